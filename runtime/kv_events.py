"""What a prefix cache keeps and lets go, told in order to readers elsewhere: routers that send a prompt to the replica
which has its beginning.

The cache's thread writes a log; it waits for no reader, and wakes none. Readers say up to where they have read. The log
is bounded: a reader who comes late, or is slow, begins anew with all that is kept.
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import islice
from typing import NamedTuple

import numpy as np

MOST_BLOCKS = 4096  # that the log tells of, some 5 MB


class KeptBlock(NamedTuple):
    """A block of tokens. hash: of these and all before them, 63 bits, the same in all replicas for the same scope;
    parent: that of the block before, None for a first one."""

    hash: int
    parent: int | None
    tokens: tuple[int, ...]


class CacheChange(NamedTuple):
    """What changed at once. number: counted from 1; time: in seconds since 1970; removed: hashes; stored: parents
    first."""

    number: int
    time: float
    removed: tuple[int, ...] = ()
    stored: tuple[KeptBlock, ...] = ()


class KVEvents:
    """The log of one prefix cache, and what it keeps now."""

    def __init__(self, most_blocks: int = MOST_BLOCKS):
        """most_blocks: how many the log tells of; its last batch stays, however many that has."""
        self.run = secrets.token_hex(8)  # numbers of batches are those of one process
        self._most, self._size = most_blocks, 0
        self._lock = threading.Lock()  # of what follows
        self._log: deque[CacheChange] = deque()
        self._last = 0  # number of the last batch
        self._kept: dict[int, KeptBlock] = {}  # by the cache's numbers; a block comes after those that it follows

    def removed(self, numbers: Sequence[int]) -> None:
        """Blocks that the cache let go. Called by its thread."""
        with self._lock:
            self._write(removed=tuple(self._kept.pop(number).hash for number in numbers))

    def stored(self, before: int | str, blocks: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        """Blocks that follow each other, as numbers and tokens. before: the number of the block ahead of the first, or
        the scope of a first one. Called by the cache's thread."""
        parent = self._kept[before].hash if isinstance(before, int) else None
        ahead, added = before if isinstance(before, str) else "", {}
        for number, tokens in blocks:
            added[number] = KeptBlock(_hash(ahead, parent, tokens), parent, tokens)
            ahead, parent = "", added[number].hash
        with self._lock:
            self._kept.update(added)
            self._write(stored=tuple(added.values()))

    def since(self, number: int) -> list[CacheChange] | None:
        """The batches after one, in order; None where the log does not have all of them."""
        with self._lock:
            missing = self._last - number
            if not 0 <= missing <= len(self._log):
                return None
            return list(islice(self._log, len(self._log) - missing, None))

    def snapshot(self) -> tuple[int, list[KeptBlock]]:
        """All that is kept, parents first, and the number of the last batch that it has."""
        with self._lock:
            return self._last, list(self._kept.values())

    def _write(self, removed: tuple[int, ...] = (), stored: tuple[KeptBlock, ...] = ()) -> None:
        """Add a batch to the log. The lock is held."""
        self._last += 1
        self._log.append(CacheChange(self._last, time.time(), removed, stored))
        self._size += len(removed) + len(stored)
        while self._size > self._most and len(self._log) > 1:
            gone = self._log.popleft()
            self._size -= len(gone.removed) + len(gone.stored)


def _hash(scope: str, parent: int | None, tokens: tuple[int, ...]) -> int:
    """Of a block's tokens and all before them, which its parent's hash stands for."""
    ahead = scope.encode() + b"\0" if parent is None else parent.to_bytes(8, "little")
    digest = sha256(ahead + np.array(tokens, "<i8").tobytes()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
