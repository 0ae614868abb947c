"""Replay a step as a CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def captured(run: Callable[[], Tensor], pool: Any) -> Callable[[], Tensor]:
    """`run` as a CUDA graph. It must work on static buffers alone; what it returns is overwritten by the next replay of
    any graph of the same memory `pool` (see `torch.cuda.graph_pool_handle`).

    The first call is a real one outside of any graph, so that everything lazy (allocations, module loads) has
    happened; the capture that follows it records and does not run, so no step is taken twice.
    """
    graph: torch.cuda.CUDAGraph | None = None
    result: Tensor | None = None

    def replay() -> Tensor:
        nonlocal graph, result
        if graph is None:
            first = run()  # a real step, outside of any graph: allocates, autotunes, loads modules
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded, pool=pool, capture_error_mode="thread_local"):  # records, does not run
                result = run()
            graph = recorded  # only now: a capture that failed must not be replayed
            return first
        graph.replay()
        assert result is not None
        return result

    return replay
