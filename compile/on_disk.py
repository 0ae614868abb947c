"""Weights that a build keeps in a file, not in memory: what a small file is widened to, and what it is packed to."""

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, NamedTuple

import torch
from torch import Tensor, nn

from ..user_cache import cache_path

LEAST = 2**16  # bytes of a tensor that is worth a place in the file
MAPPED = 2**30  # bytes that are mapped at once: a mapping takes one of the few files that a process may open
COPIED = 2**24  # elements that are copied at once
SPARED = 2**30  # bytes of the disk that are left to others, beside what the engine will take
Keep = Callable[[Tensor], Tensor]  # a tensor -> the same where it may stay


class _Place(NamedTuple):
    """Where a tensor lies: bytes of a mapping."""

    memory: mmap.mmap
    start: int
    size: int

    def release(self) -> None:
        self.memory.madvise(mmap.MADV_DONTNEED, self.start, self.size)


def in_memory(tensor: Tensor) -> Tensor:
    """Leave a tensor where it is."""
    return tensor


class OnDisk:
    """A file without a name in the user's cache, and the tensors that lie in it. The system writes them to the disk
    where it needs the memory, and reads them again.

    A disk that is nearly full, or that cannot be written, keeps nothing more: tensors stay in memory.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._places: dict[int, _Place] = {}  # by the address of the tensor
        self._memory: mmap.mmap | None = None  # the last mapping, and how much of it is taken
        self._taken = self._kept = 0
        if not hasattr(os, "posix_fallocate") or not hasattr(mmap, "MADV_DONTNEED"):
            return  # no Linux
        with contextlib.suppress(OSError):
            cache_path().mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=cache_path())  # noqa: SIM115 - open as long as the tensors

    def __enter__(self) -> "OnDisk":
        return self

    def __exit__(self, *_: object) -> None:
        """Keep nothing more. What somebody uses of it stays as long as that."""
        self._places.clear()
        self._memory = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def keep(self, tensor: Tensor) -> Tensor:
        """A tensor of the CPU -> the same, contiguous, in the file."""
        if tensor.nbytes < LEAST or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return tensor
        if tensor.data_ptr() in self._places and tensor.is_contiguous():
            return tensor
        place = self._new_place(tensor.nbytes)
        if place is None:
            return tensor
        flat = torch.frombuffer(place.memory, dtype=tensor.dtype, count=tensor.numel(), offset=place.start)
        for part, given in zip(flat.split(COPIED), tensor.contiguous().view(-1).split(COPIED), strict=True):
            part.copy_(given)
            place.release()
        held = flat.view(tensor.shape)
        self._places[held.data_ptr()] = place
        return held

    def _new_place(self, count: int) -> _Place | None:
        """Room for so many bytes, which the disk has: one that is full ends a process that writes to mapped memory."""
        size = -(-count // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        if self._file is None:
            return None
        file = self._file.fileno()
        try:
            free = os.fstatvfs(file)
            if free.f_bavail * free.f_frsize < size + self._kept + SPARED:
                raise OSError("no space left")
            if self._memory is None or self._taken + size > len(self._memory):
                end, self._taken = os.fstat(file).st_size, 0
                os.ftruncate(file, end + max(size, MAPPED))  # nothing is taken of the disk yet
                self._memory = mmap.mmap(file, max(size, MAPPED), offset=end)
            os.posix_fallocate(file, os.fstat(file).st_size - len(self._memory) + self._taken, size)
        except OSError:
            self._file.close()
            self._file = None
            return None
        place = _Place(self._memory, self._taken, size)
        self._taken += size
        self._kept += size
        return place

    def release(self, tensor: Tensor) -> None:
        """Take a tensor that lies in the file out of this process's memory, until it is read again."""
        place = self._places.get(tensor.data_ptr())
        if place is not None:
            place.release()

    def release_all(self) -> None:
        """Take all that lies in the file out of this process's memory, until it is read again."""
        for memory in {id(place.memory): place.memory for place in self._places.values()}.values():
            memory.madvise(mmap.MADV_DONTNEED)

    @contextlib.contextmanager
    def read_in_turn(self) -> Iterator[None]:
        """Within it, the weights of a module are out of memory once it has run."""

        def release(module: nn.Module, *_: object) -> None:
            for parameter in module.parameters(recurse=False):
                if type(parameter) is nn.Parameter and parameter.layout == torch.strided:  # no tensor of a trace
                    self.release(parameter)

        hook = nn.modules.module.register_module_forward_hook(release)
        try:
            yield
        finally:
            hook.remove()
