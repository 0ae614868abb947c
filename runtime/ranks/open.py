"""Opens an engine of several ranks: starts the others, and joins them."""

import os
from pathlib import Path

import torch

from ...errors import EngineError
from ...kernels.communicator import Communicator, make_shared_memory
from ..engine_file import EngineSpec, manifest_digest
from ..inductor.torch_session import Program
from .cores import shared_cores
from .processes import RankProcess, close_all
from .session import RankSession


def open_ranks(directory: Path, spec: EngineSpec, programs: list[Program]) -> RankSession:
    """Start the further ranks of an engine -> the session of the first, whose programs these are. Raises EngineError
    where one does not load."""
    threads, flush = max(1, torch.get_num_threads() // spec.ranks), _flushes_denormals()
    cores = shared_cores(spec.ranks)
    others: list[RankProcess] = []
    memory: int | None = None
    communicator: Communicator | None = None
    try:
        memory = make_shared_memory(spec.ranks)
        digest = manifest_digest(directory)
        for rank in range(1, spec.ranks):
            others.append(RankProcess(directory, digest, rank, spec.ranks, memory, threads, flush, cores[rank]))
        communicator = Communicator(memory, 0, spec.ranks)
        for each in others:
            each.wait_until_loaded()
        return RankSession(spec, programs, communicator, others, threads, flush)
    except BaseException as error:
        if communicator is not None:
            communicator.leave()
        close_all(others)
        if isinstance(error, OSError):
            raise EngineError(f"ranks: expected to start {spec.ranks} of them, got {error}") from None
        raise
    finally:
        if memory is not None:
            os.close(memory)


def _flushes_denormals() -> bool:
    """Whether this thread takes numbers that are too small to be normal for 0 (`torch.set_flush_denormal`)."""
    return not bool(torch.full((1,), torch.finfo(torch.float32).tiny).div(2).count_nonzero())
