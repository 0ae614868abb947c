"""Ranks as threads of one process, to try what they compute without compiling it."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

from torch import Tensor

from ...kernels.communicator import Communicator, make_shared_memory
from ...kernels.gather_ranks.op import gathering
from ...kernels.gather_ranks.reference import gather_ranks
from ...kernels.native import load_library

PATIENCE = 600.0  # seconds that a thread waits for what another one computes


class _Meeting:
    """What threads gather, on any device: each leaves its part, and takes all of them."""

    def __init__(self, ranks: int):
        self._parts: list[Any] = [None] * ranks
        self.barrier = Barrier(ranks, timeout=PATIENCE)

    def gather(self, rank: int, x: Tensor) -> Tensor:
        """Raises BrokenBarrierError where another rank has ended."""
        self._parts[rank] = x
        self.barrier.wait()
        every = gather_ranks(self._parts)
        self.barrier.wait()
        return every


def on_ranks(ranks: int, run: Callable[[int], Any]) -> list[Any]:
    """What `run(rank)` returns on each of so many ranks, or the exception that it raises."""
    load_library()
    file, meeting = make_shared_memory(ranks), _Meeting(ranks)

    def one(rank: int) -> Any:
        communicator = Communicator(file, rank, ranks)
        try:
            with communicator.bound(), gathering(ranks, lambda x: meeting.gather(rank, x)):
                return run(rank)
        except Exception as error:
            meeting.barrier.abort()
            return error
        finally:
            communicator.leave()

    try:
        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(one, range(ranks)))
    finally:
        os.close(file)
