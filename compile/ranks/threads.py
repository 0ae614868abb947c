"""Ranks as threads of one process, to try what they compute without compiling it."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...kernels.communicator import Communicator, make_shared_memory
from ...kernels.native import load_library


def on_ranks(ranks: int, run: Callable[[int], Any]) -> list[Any]:
    """What `run(rank)` returns on each of so many ranks, or the exception that it raises."""
    load_library()
    file = make_shared_memory(ranks)

    def one(rank: int) -> Any:
        communicator = Communicator(file, rank, ranks)
        try:
            with communicator.bound():
                return run(rank)
        except Exception as error:
            return error
        finally:
            communicator.leave()

    try:
        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(one, range(ranks)))
    finally:
        os.close(file)
