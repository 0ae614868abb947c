"""A cache in pages of the system's. A row reserves addresses for its longest text, takes memory for what it holds,
gives that back where it ends, and shares what it has from the store with the store until one of them writes.
"""

import ctypes
import functools
import logging
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from ..engine_file import TensorSpec
from ..unreserved import OWN, unreserved
from .dense_cache import DenseCache

logger = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE
READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
FIXED = 0x10  # Linux: at this address, in place of what is there
FEWEST = 8  # pages of a head that are mapped: fewer are copied as fast


class PagedCache(DenseCache):
    """A cache [B, H, S, D] in memory of a CPU, in pages of its own; see `DenseCache`."""

    def __init__(self, spec: TensorSpec, most_mappings: int):
        """most_mappings: parts of it that may lie in the store at a time. Raises OSError where the system refuses."""
        self._dtype, self._most_mappings = getattr(torch, spec.dtype), most_mappings
        self._memory, self.tensor = unreserved(spec.shape, self._dtype)
        self._address = self.tensor.data_ptr()
        self._row_bytes, self._head_bytes, self._slot_bytes, _ = (
            stride * self._dtype.itemsize for stride in self.tensor.stride()
        )
        self._shared: list[tuple[int, int, int, int]] = []  # row, bytes of each head from and to, bytes in the store

    def make_store(self, slots: int, lookahead: int) -> None:
        """Allocate the store. lookahead: slot 0 of the store lies in a page where slot -lookahead of a row would."""
        heads, width = self.tensor.shape[1], self.tensor.shape[3]
        whole = PAGE // math.gcd(PAGE, self._slot_bytes)  # slots that end where a page does
        self._before = -lookahead % whole
        total = -(-(self._before + slots) // whole) * whole
        self._file = os.memfd_create("specstep prefixes", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, heads * total * self._slot_bytes)
        path, count = f"/proc/self/fd/{self._file}", heads * total * width
        whole_store = torch.from_file(path, shared=True, size=count, dtype=self._dtype).view(heads, total, width)
        self.store = whole_store[:, self._before : self._before + slots]
        self._store_head_bytes = total * self._slot_bytes

    def keep(self, row: int, start: int, place: int, count: int) -> None:
        """Copy a row's slots to the store. Rows that share these of the store have copies of their own from now on."""
        first = (self._before + place) * self._slot_bytes
        self._part(first, first + count * self._slot_bytes)
        self.store[:, place : place + count] = self.tensor[row, :, start : start + count]

    def recall(self, row: int, start: int, place: int, count: int) -> None:
        """Have a row's slots be those of the store: whole pages are mapped, and the others copied."""
        first, last = _up(start * self._slot_bytes), _down((start + count) * self._slot_bytes)
        moved = (self._before + place - start) * self._slot_bytes
        heads = self.tensor.shape[1]
        fits = moved % PAGE == 0 and self._head_bytes % PAGE == 0 and last - first >= FEWEST * PAGE
        if not fits or (len(self._shared) + 1) * heads > self._most_mappings:
            self.tensor[row, :, start : start + count] = self.store[:, place : place + count]
            return
        for head in range(heads):
            offset = first + moved + head * self._store_head_bytes
            self._map(self._place(row, head) + first, last - first, mmap.MAP_PRIVATE, self._file, offset)
        self._shared.append((row, first, last, first + moved))
        for begin, end in ((start, -(-first // self._slot_bytes)), (last // self._slot_bytes, start + count)):
            if begin < end:
                at = place + begin - start
                self.tensor[row, :, begin:end] = self.store[:, at : at + end - begin]

    def clear(self, row: int, slots: int) -> None:
        """Fill the first slots of a row with zeros: whole pages are new ones when they are next touched."""
        for _, first, last, _ in (shared for shared in self._shared if shared[0] == row):
            for head in range(self.tensor.shape[1]):
                self._map(self._place(row, head) + first, last - first, OWN, -1, 0)
                with suppress(OSError):
                    self._memory.madvise(mmap.MADV_NOHUGEPAGE, self._place(row, head) + first, last - first)
        self._shared = [shared for shared in self._shared if shared[0] != row]
        for head in range(self.tensor.shape[1]):
            start = self._place(row, head)
            end = start + slots * self._slot_bytes
            if _up(start) >= _down(end):
                self._zero(start, end)
                continue
            self._memory.madvise(mmap.MADV_DONTNEED, _up(start), _down(end) - _up(start))
            self._zero(start, _up(start))
            self._zero(_down(end), end)

    def _place(self, row: int, head: int) -> int:
        return row * self._row_bytes + head * self._head_bytes

    def _zero(self, start: int, end: int) -> None:
        self._memory[start:end] = bytes(end - start)

    def _part(self, first: int, last: int) -> None:
        """Have rows that share these bytes of the store write to the pages, which copies them."""
        for row, start, end, at in self._shared:
            begin, stop = max(_down(first), at), min(_up(last), at + end - start)
            for head in range(self.tensor.shape[1]):
                for page in range(begin, stop, PAGE):
                    place = self._place(row, head) + start + page - at
                    self._memory[place] = self._memory[place]

    def _map(self, start: int, size: int, flags: int, file: int, offset: int) -> None:
        address = self._address + start
        if _libc().mmap(address, size, READ_AND_WRITE, flags | FIXED, file, offset) != address:
            raise OSError(ctypes.get_errno(), f"mmap: {os.strerror(ctypes.get_errno())}")


def make_caches(specs: Sequence[TensorSpec], device: torch.device) -> dict[str, DenseCache]:
    """The caches by name: paged ones on a CPU under Linux, whose pages can be given back."""
    if device.type == "cpu":
        try:
            # All of them may have a quarter of the mappings that a process may have.
            most = int(Path("/proc/sys/vm/max_map_count").read_text()) // 4 // max(len(specs), 1)
            return {spec.name: PagedCache(spec, most) for spec in specs}
        except OSError as error:
            logger.warning("caches keep the memory that they once took: %s", error)
    return {spec.name: DenseCache(spec, device) for spec in specs}


def _up(size: int) -> int:
    """Bytes, up to a page's end."""
    return -(-size // PAGE) * PAGE


def _down(size: int) -> int:
    return size // PAGE * PAGE


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    return library
