"""Where the ranks of an engine meet, and what each of them computes on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...errors import InputError
from ...kernels.communicator import Communicator
from ...kernels.nccl import NcclCommunicator
from .cores import stay_on


class Place(Protocol):
    """One rank's. It is sent to that rank's process."""

    @property
    def files(self) -> Sequence[int]:
        """What its process takes over from the first one's."""

    def enter(self) -> None:
        """Have this thread, and what it starts, compute there: ahead of all else."""

    def join(self, rank: int, ranks: int) -> Communicator | NcclCommunicator:
        """Meet the other ranks. Raises OSError."""


@dataclass(frozen=True)
class CorePlace:
    """Cores of this machine, and memory that all ranks share."""

    memory: int  # what `make_shared_memory` gave
    cores: frozenset[int]  # none: any

    @property
    def files(self) -> Sequence[int]:
        return (self.memory,)

    def enter(self) -> None:
        stay_on(self.cores)

    def join(self, rank: int, ranks: int) -> Communicator:
        return Communicator(self.memory, rank, ranks)


@dataclass(frozen=True)
class GpuPlace:
    """A GPU of this machine, and the name of the group that NCCL joins."""

    unique_id: bytes
    gpu: int

    @property
    def files(self) -> Sequence[int]:
        return ()

    def enter(self) -> None:
        torch.cuda.set_device(self.gpu)

    def join(self, rank: int, ranks: int) -> NcclCommunicator:
        return NcclCommunicator(self.unique_id, rank, ranks)


def gpus_of_ranks(first: int, ranks: int) -> list[int]:
    """The GPUs of so many ranks, `first` and those behind it. Raises InputError where there are fewer, or others than
    the first: its programs are for one kind, and all ranks must have the same bits."""
    count = torch.cuda.device_count()
    if first + ranks > count:
        raise InputError(
            f"device: expected {ranks} GPUs from cuda:{first} on, one for each rank, got {max(0, count - first)}"
        )
    gpus = [*range(first, first + ranks)]
    names = {torch.cuda.get_device_name(gpu) for gpu in gpus}
    if len(names) > 1:
        raise InputError(f"device: expected {ranks} GPUs of one kind, got {' and '.join(sorted(names))}")
    return gpus
