"""Opens an engine of several ranks: starts the others, and joins them."""

import os
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

import torch

from ...errors import EngineError
from ...kernels.communicator import Communicator, make_shared_memory
from ...kernels.nccl import NcclCommunicator, make_unique_id
from ..engine_file import EngineSpec, manifest_digest
from ..inductor.torch_session import Program
from .arithmetic import arithmetic
from .cores import shared_cores
from .places import CorePlace, GpuPlace, Place, gpus_of_ranks
from .processes import RankProcess, RankStart, close_all, leave_when_one_ends
from .session import RankSession

LOOK = 0.1  # seconds between two looks whether all ranks are there that join


def open_ranks(directory: Path, spec: EngineSpec, programs: list[Program]) -> RankSession:
    """Start the further ranks of an engine -> the session of the first, whose programs these are. Raises EngineError
    where one does not load, and InputError where there are too few GPUs."""
    threads, alike = max(1, torch.get_num_threads() // spec.ranks), arithmetic()
    others: list[RankProcess] = []
    places: list[Place] = []
    communicator: Communicator | NcclCommunicator | None = None
    try:
        places += _on_gpus(spec.ranks) if spec.device == "cuda" else _on_cores(spec.ranks)
        digest = manifest_digest(directory)
        for rank in range(1, spec.ranks):
            given = RankStart(directory, digest, rank, spec.ranks, places[rank], os.getpid(), threads, alike)
            others.append(RankProcess(given))
        for each in others:
            each.wait_for_answer()
        communicator = _join(places[0], others)
        for each in others:
            each.wait_for_answer()
        if spec.device == "cuda":
            Thread(target=leave_when_one_ends, args=(others, communicator), daemon=True).start()
        return RankSession(spec, programs, communicator, others, threads, alike)
    except BaseException as error:
        if communicator is not None:
            communicator.leave()
        close_all(others)
        if isinstance(error, OSError):
            raise EngineError(f"ranks: expected to start {spec.ranks} of them, got {error}") from None
        raise
    finally:
        for file in places[0].files if places else ():
            os.close(file)


def _on_cores(ranks: int) -> list[CorePlace]:
    """The places of ranks on a CPU; the first stays on the cores where its process is. Raises OSError."""
    _, *others = shared_cores(ranks)
    memory = make_shared_memory(ranks)
    return [CorePlace(memory, frozenset(cores)) for cores in ((), *others)]


def _on_gpus(ranks: int) -> list[GpuPlace]:
    """The places of ranks on the current GPU and those behind it. Raises InputError, and OSError without NCCL."""
    gpus = gpus_of_ranks(torch.cuda.current_device(), ranks)
    unique_id = make_unique_id()
    return [GpuPlace(unique_id, gpu) for gpu in gpus]


def _join(place: Place, others: list[RankProcess]) -> Communicator | NcclCommunicator:
    """Meet the others, who wait for each other. Raises EngineError where one ends before."""
    joined: Future[Communicator | NcclCommunicator] = Future()

    def join() -> None:
        try:
            place.enter()
            joined.set_result(place.join(0, 1 + len(others)))
        except BaseException as error:
            joined.set_exception(error)

    Thread(target=join, daemon=True).start()  # it never ends where another rank does not come
    while True:
        try:
            return joined.result(LOOK)
        except TimeoutError:
            for each in others:
                if each.has_ended:
                    each.wait_for_answer()  # it may have said why
                    raise each.ended() from None
