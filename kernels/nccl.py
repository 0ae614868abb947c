"""Joins ranks that have a GPU each, by NCCL: the library that PyTorch for CUDA brings, and a few of its functions.

PyTorch's own process groups need a server for their start, and end the process where a rank is lost.
"""

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .gather_ranks.op import gathering

LIBRARY = "libnccl.so.2"
INT8 = 0  # NCCL's number of that dtype
PATIENCE = 5.0  # seconds that one rank's end waits for what it gathers at that time
AHEAD = 64  # gathers outside of CUDA graphs, after which the host waits for the GPU


class _UniqueId(ctypes.Structure):
    """It is passed by value."""

    _fields_ = (("bytes", ctypes.c_byte * 128),)


class NcclCommunicator:
    """One rank's part in a group of ranks. `specstep::gather_ranks` exchanges with the others while it is bound to the
    thread that runs it."""

    def __init__(self, unique_id: bytes, rank: int, ranks: int):
        """Join the group, with the current GPU, of which no other rank is; waits for all the others. unique_id: what
        `make_unique_id` gave one of them. Raises OSError."""
        self.rank, self.ranks = rank, ranks
        self.failure: str | None = None  # what NCCL said last: of an error in a program only its place is passed on
        self._handle: int | None = None
        self._in_use, self._turns = threading.Lock(), itertools.count(1)
        handle = ctypes.c_void_p()
        given = _UniqueId.from_buffer_copy(unique_id)
        _call("ncclCommInitRank", ctypes.byref(handle), ctypes.c_int(ranks), given, ctypes.c_int(rank))
        self._handle = handle.value

    @property
    def joined(self) -> bool:
        """Whether this rank has not left. Once it has, what it gathers means nothing."""
        return self._handle is not None

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        """Within it, the calling thread is this rank."""
        with gathering(self.ranks, self._gather):
            yield

    def leave(self) -> None:
        """End this rank's part, from any thread: what waits on the GPU for others waits no more. Does not wait itself:
        NCCL forgets a rank when the last CUDA graph is gone that it gathers in."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(RuntimeError):  # no thread starts where a process of Python 3.12 ends
                threading.Thread(target=self._abort, args=(handle,), daemon=True).start()

    def _abort(self, handle: int) -> None:
        if self._in_use.acquire(timeout=PATIENCE):  # what is gathered may itself wait for a rank that is gone
            self._in_use.release()
        _call("ncclCommAbort", ctypes.c_void_p(handle))

    def _gather(self, x: Tensor) -> Tensor:
        """Behind what the current stream does. Raises RuntimeError."""
        every = x.new_empty((self.ranks, *x.shape))
        stream = torch.cuda.current_stream(x.device)
        places = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(every.data_ptr())
        with self._in_use:
            if self._handle is None:
                raise RuntimeError("this rank has left")
            group, size = ctypes.c_void_p(self._handle), ctypes.c_size_t(x.nbytes)
            try:
                _call("ncclAllGather", *places, size, ctypes.c_int(INT8), group, ctypes.c_void_p(stream.cuda_stream))
            except OSError as error:
                self.failure = str(error)
                raise RuntimeError(self.failure) from None
        if not torch.cuda.is_current_stream_capturing() and next(self._turns) % AHEAD == 0:
            # A program that waits for a place in the GPU's queue holds Python's lock: no thread could free it.
            stream.synchronize()
        return every


def make_unique_id() -> bytes:
    """What names a new group of ranks. Raises OSError."""
    made = _UniqueId()
    _call("ncclGetUniqueId", ctypes.byref(made))
    return bytes(made)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of NCCL. Raises OSError where it fails, or there is no NCCL."""
    library = ctypes.CDLL(LIBRARY)  # which PyTorch has loaded, wherever it lies
    status = getattr(library, name)(*arguments)
    if status != 0:
        library.ncclGetErrorString.restype = library.ncclGetLastError.restype = ctypes.c_char_p
        said = [library.ncclGetErrorString(status), library.ncclGetLastError(None)]
        raise OSError(f"{name}: {': '.join(part.decode(errors='replace') for part in said if part)}")
