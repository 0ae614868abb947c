"""Admission: a choice of an answer has a place from its beginning to its end, a row or one to wait for a row."""

import contextlib
from collections.abc import Iterator


class QueueFullError(Exception):
    """As many choices run and wait as may."""


class TooManyError(Exception):
    """More choices than one call may have."""


class Queue:
    """The places of one engine. Belongs to one event loop."""

    def __init__(self, rows: int, max_queue: int):
        """max_queue: choices that may wait for a row."""
        self.most, self.taken = rows + max_queue, 0
        self.share = max(rows, self.most // 2)  # of one call, which leaves places to others

    def require(self, count: int) -> None:
        """Raises QueueFullError where there are not as many places."""
        if self.taken + count > self.most:
            raise QueueFullError(f"the queue is full: {self.taken} answers run or wait; try again later")

    def take(self, count: int) -> "Places":
        """Places for so many choices of one call. Raises TooManyError, QueueFullError."""
        if count > self.share:
            raise TooManyError(f"n: expected at most {self.share} choices in one call, got {count}")
        self.require(count)
        return Places(self, count)


class Places:
    """Places that a call has taken; given back once, all or one by one."""

    def __init__(self, queue: Queue, count: int):
        self._queue, self._left = queue, count
        queue.taken += count

    def give_back(self, count: int | None = None) -> None:
        """So many of them, or all that are left."""
        count = self._left if count is None else min(count, self._left)
        self._left -= count
        self._queue.taken -= count


@contextlib.contextmanager
def on_error(places: Places) -> Iterator[None]:
    """Gives places back where the block raises."""
    try:
        yield
    except BaseException:
        places.give_back()
        raise
