"""Weights that a build keeps in a file, not in memory: what a small file is widened to, and what it is packed to."""

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import IO

import torch
from torch import Tensor, nn

from ..user_cache import cache_path

LEAST = 2**16  # bytes of a tensor that is worth a mapping of its own
Keep = Callable[[Tensor], Tensor]  # a tensor -> the same where it may stay


def in_memory(tensor: Tensor) -> Tensor:
    """Leave a tensor where it is."""
    return tensor


class OnDisk:
    """A file without a name in the user's cache, and the tensors that lie in it. The system writes them to the disk
    where it needs the memory, and reads them again.

    A disk that is full, or that cannot be written, keeps nothing: tensors stay in memory.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._mapped: dict[int, mmap.mmap] = {}  # by the address of the tensor in it
        with contextlib.suppress(OSError):
            cache_path().mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=cache_path())  # noqa: SIM115 - open as long as the tensors

    def keep(self, tensor: Tensor) -> Tensor:
        """A tensor of the CPU -> the same, contiguous, in the file."""
        if self._file is None or tensor.nbytes < LEAST or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return tensor
        if tensor.data_ptr() in self._mapped and tensor.is_contiguous():
            return tensor
        start = os.fstat(self._file.fileno()).st_size
        size = -(-tensor.nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            os.posix_fallocate(self._file.fileno(), start, size)  # a full disk ends a process that writes to it
            memory = mmap.mmap(self._file.fileno(), size, offset=start)
        except (OSError, AttributeError):  # of a system that has no such call
            return tensor
        held = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape)
        held.copy_(tensor)
        self._mapped[held.data_ptr()] = memory
        self.release(held)
        return held

    def release(self, tensor: Tensor) -> None:
        """Take a tensor that lies in the file out of this process's memory, until it is read again."""
        memory = self._mapped.get(tensor.data_ptr())
        if memory is not None and hasattr(memory, "madvise"):
            memory.madvise(mmap.MADV_DONTNEED)

    @contextlib.contextmanager
    def read_in_turn(self) -> Iterator[None]:
        """Within it, the weights of a module are out of memory once it has run."""

        def release(module: nn.Module, *_: object) -> None:
            for parameter in module.parameters(recurse=False):
                if type(parameter) is nn.Parameter:  # no tensor of a trace, which has no address
                    self.release(parameter)

        hook = nn.modules.module.register_module_forward_hook(release)
        try:
            yield
        finally:
            hook.remove()

    def release_all(self) -> None:
        """The same of all tensors."""
        for memory in self._mapped.values():
            if hasattr(memory, "madvise"):
                memory.madvise(mmap.MADV_DONTNEED)
