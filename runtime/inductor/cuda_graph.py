"""Replay a step as a CUDA graph, and bring its report to the host."""

import logging
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LOGGER = logging.getLogger(__name__)


class CudaGraphs:
    """The steps of one session as CUDA graphs, which share their memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._failed = False  # whether a capture has

    def of(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """`run` as a CUDA graph. It must work on static buffers alone; what it returns is overwritten by the next
        replay of any graph.

        The first call is a real one outside of any graph, so that everything lazy (allocations, module loads) has
        happened; the capture that follows it records and does not run, so no step is taken twice. Where one cannot be
        captured, a warning says so, once, and steps run as they are.
        """
        graph: torch.cuda.CUDAGraph | None = None
        result: Tensor | None = None

        def replay() -> Tensor:
            nonlocal graph, result
            if graph is not None:
                graph.replay()
                assert result is not None
                return result
            first = run()
            if not self._failed:
                try:
                    graph, result = self._capture(run)
                except RuntimeError as error:
                    self._failed = True
                    LOGGER.warning("steps run without CUDA graphs, and slower: a capture failed: %s", error)
            return first

        return replay

    def _capture(self, run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Record a call, which does not run."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        return graph, result


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
