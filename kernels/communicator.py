"""Joins ranks that compute a part each of one engine: see communicator.cpp."""

import contextlib
import ctypes
import os
from collections.abc import Iterator


def make_shared_memory(ranks: int) -> int:
    """A file descriptor of memory for so many ranks, which has no name: nothing of it is left when the last process
    that has it ends. It is passed to the process of each rank. The library is loaded. Raises OSError."""
    file = os.memfd_create("specstep-ranks")  # not inherited, but by whom it is passed to
    try:
        size = _library().specstep_communicator_bytes(ctypes.c_int64(ranks))
        os.ftruncate(file, size)
    except BaseException:
        os.close(file)
        raise
    return file


class Communicator:
    """One rank's part in it. Ops of ours exchange with the other ranks while it is bound to the thread that runs
    them."""

    failure: str | None = None  # these ops fail where another rank has ended, and for nothing else

    def __init__(self, file: int, rank: int, ranks: int):
        """file: what `make_shared_memory` gave; it may be closed afterwards. Raises OSError."""
        self.rank, self.ranks = rank, ranks
        self._handle = _library().specstep_join_ranks(file, ctypes.c_int64(rank), ctypes.c_int64(ranks))
        if not self._handle:
            raise OSError(f"ranks: rank {rank} of {ranks} cannot map the memory that they share")

    @property
    def joined(self) -> bool:
        """Whether this rank has not left."""
        return self._handle is not None

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        """Within it, the calling thread is this rank."""
        library = _library()
        library.specstep_bind_ranks(ctypes.c_void_p(self._handle))
        try:
            yield
        finally:
            library.specstep_bind_ranks(None)

    def leave(self) -> None:
        """End this rank's part: ops of the others that wait for it fail. It is bound nowhere."""
        handle, self._handle = self._handle, None
        if handle:
            _library().specstep_leave_ranks(ctypes.c_void_p(handle))


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)  # its names are global: see `native.load_library`
    library.specstep_communicator_bytes.restype = ctypes.c_int64
    library.specstep_join_ranks.restype = ctypes.c_void_p
    return library
