"""A model that is served: its engine, and the places in its queue."""

import contextlib
import math
import time
from collections.abc import Iterator
from functools import cached_property

from ..errors import EngineError
from ..runtime.engine import Engine
from .errors import BUSY, ApiError
from .token_text import TokenText

MOST_WAIT = 60  # seconds that Retry-After says at most


class Served:
    """One engine under its name. A choice of an answer takes a place from its admission to its end: a row, or one of
    `max_queue` places to wait for one."""

    def __init__(self, name: str, engine: Engine, max_queue: int, learning: bool):
        """learning: whether answers may be counted for the drafts of later ones."""
        self.name, self.engine, self.learning = name, engine, learning
        self.rows, self.max_queue = engine.spec.max_batch, max_queue
        self.taken, self.created = 0, int(time.time())
        self._seconds = 1.0  # that a call took, a running mean

    @cached_property
    def token_text(self) -> TokenText | None:
        """None for an engine without a tokenizer."""
        return None if self.engine.text is None else TokenText(self.engine.text)

    @property
    def most_tokens(self) -> int:
        """The longest prompt."""
        return self.engine.spec.max_seq_len - 1

    @property
    def most_characters(self) -> int:
        """The longest text that can be a prompt, whatever its tokens are."""
        return self.most_tokens * (self.token_text.longest if self.token_text else 1)

    @property
    def waiting(self) -> int:
        """Choices that wait for one."""
        return max(0, self.taken - self.rows)

    def check(self) -> None:
        """Raises EngineError where no request can run any more, now or later."""
        if self.engine.broken is not None:
            raise EngineError(f"{self.name}: expected an engine that runs, got one that failed; load it again")
        _ = self.engine.session  # which a closed engine refuses

    def take(self, count: int) -> "Places":
        """Places for so many choices of one call. Raises ApiError where there are not as many."""
        most = self.rows + self.max_queue
        share = max(self.rows, most // 2)  # so that one call leaves places to others
        if count > share:
            raise ApiError(400, f"n: expected at most {share} choices in one call, got {count}", param="n")
        if self.taken + count > most:
            wait = math.ceil(self._seconds * (self.waiting + 1) / self.rows)
            headers = {"Retry-After": str(max(1, min(wait, MOST_WAIT)))}
            raise ApiError(
                429, f"{self.waiting} answers wait already; try again later", BUSY, None, "queue_full", headers
            )
        return Places(self, count)

    def took(self, seconds: float) -> None:
        """Learn how long a call lasted."""
        self._seconds += 0.1 * (seconds - self._seconds)


class Places:
    """Places that a call has taken; given back once, all or one by one."""

    def __init__(self, served: Served, count: int):
        self._served, self._left = served, count
        served.taken += count

    def give_back(self, count: int | None = None) -> None:
        """So many of them, or all that are left."""
        count = self._left if count is None else min(count, self._left)
        self._left -= count
        self._served.taken -= count


@contextlib.contextmanager
def on_error(places: Places) -> Iterator[None]:
    """Gives places back where the block raises."""
    try:
        yield
    except BaseException:
        places.give_back()
        raise
