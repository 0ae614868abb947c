"""Records steps as CUDA graphs of PyTorch, and brings their reports to the host."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def graph_capture() -> Callable[[Callable[[], Tensor]], Callable[[], Tensor]]:
    """What records calls as CUDA graphs, which share their memory, for `CudaGraphs`."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = run()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return capture


class Reports:
    """Copies of reports on the host: each is copied behind its step, to memory that the device writes by itself, and
    waited for by an event. Two steps may be under way at a time."""

    def __init__(self, rows: int, columns: int):
        self._pinned = [torch.empty(rows, columns, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)]

    def fetch(self, report: Tensor) -> Callable[[], NDArray[np.int64]]:
        """Begin to copy a report [B, columns] -> what waits for it. It is to be called before the next but one."""
        pinned, event = self._pinned[0][: len(report)], self._events[0]
        self._pinned.reverse()
        self._events.reverse()
        pinned.copy_(report, non_blocking=True)
        event.record()

        def wait() -> NDArray[np.int64]:
            event.synchronize()
            return pinned.numpy().copy()

        return wait
