"""A submission: requests that were queued together, as their reader and the scheduler's worker see them."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue

from ..report import REASONS
from .asked.request import Event, Request

# What a step did for a request, or what failed with it; what failed with all; None: nothing more comes.
Told = tuple[Request, Event | BaseException] | BaseException | None


class Events(SimpleQueue[Told]):
    """What the worker tells, in order. listener: called after each, by the thread that tells, with whether a request
    ends with it; it must not raise."""

    listener: Callable[[bool], None] | None = None

    def put(self, told: Told, block: bool = True, timeout: float | None = None) -> None:
        super().put(told)
        if self.listener is not None:
            self.listener(_ends(told))


def _ends(told: Told) -> bool:
    return not isinstance(told, tuple) or not isinstance(told[1], Event) or told[1].output.finish in REASONS


class Caller:
    """The worker's side of a submission. Only the worker takes from `waiting`; `events` is read by the caller."""

    def __init__(self, requests: Sequence[Request]):
        self.waiting = deque(requests)
        self.events = Events()
        self.cancelled = False
        # Of how requests end. `Submission.cancel` is for any thread, and for a signal's handler inside of a reader.
        self.lock = threading.RLock()

    def forked(self, error: BaseException) -> None:
        """In a forked child, which has neither the worker nor who held the lock or listens: raise an error to those who
        read."""
        self.events, self.lock = Events(), threading.RLock()
        self.waiting.clear()
        self.events.put(error)

    def cancel(self) -> None:
        self.cancelled = True
        self.events.put(None)


class Submission:
    """Requests on their way: an iterator of each request with its new tokens, as they come.

    A request is updated when its tokens are read; one that ends with them, at a stop string, has no more. Leaving the
    iterator for good, by `cancel`, `with` or garbage collection, gives the rows back. What a prefill, a step or a mask
    raises is raised here, now and at each further read; all requests that have not ended end as "failed".
    """

    def __init__(self, caller: Caller, requests: Sequence[Request]):
        self._caller = caller
        self._unfinished = list(requests)
        self._error: BaseException | None = None
        self._abandoned = weakref.finalize(self, caller.cancel)

    def __iter__(self) -> Iterator[tuple[Request, list[int]]]:
        return self

    def __next__(self) -> tuple[Request, list[int]]:
        return self._read(block=True)

    def poll(self) -> tuple[Request, list[int]] | None:
        """As `next`, without waiting: None where nothing new has come. Raises StopIteration at the end."""
        try:
            return self._read(block=False)
        except Empty:
            return None

    def listen(self, listener: Callable[[bool], None]) -> None:
        """Have a function called, now and by the engine's thread whenever there may be more to `poll`, with whether a
        request ends with it. It must be quick and must not raise. A listener that keeps the submission keeps it from
        being collected: then `cancel` alone ends it."""
        self._caller.events.listener = listener
        listener(True)

    def cancel(self) -> None:
        """End the requests that still run or wait, from any thread or a signal's handler; a reader that waits gets no
        more. What was read so far stays, with the finish reason "cancelled"."""
        self._end("cancelled")

    def _end(self, reason: str) -> None:
        """End the requests that have not, for a reason."""
        self._abandoned()
        with self._caller.lock:
            for request in self._unfinished:
                request.finish_reason = request.finish_reason or reason

    def _read(self, block: bool) -> tuple[Request, list[int]]:
        """The next request with its new tokens. Raises Empty where that would wait and must not."""
        if self._error is not None:
            raise self._error
        if not self._unfinished or self._caller.cancelled:
            self.cancel()
            raise StopIteration
        request, event = self._next_event(block)
        with self._caller.lock:
            if request.finish_reason:  # by another thread, since it was looked at
                raise StopIteration
            tokens = request.advance(event)
            if request.finish_reason:
                self._unfinished = [other for other in self._unfinished if other is not request]
        return request, tokens

    def _next_event(self, block: bool) -> tuple[Request, Event]:
        """Wait for what the worker says of a request that goes on: the worker may be a step ahead of one that ended at
        a stop string. Raises Empty."""
        while True:
            told = self._caller.events.get(block)
            if told is None:
                self._caller.events.put(None)  # for other readers
                self.cancel()
                raise StopIteration
            if isinstance(told, BaseException):
                raise self._failed(told)
            request, event = told
            if request.finish_reason is not None:
                continue
            if isinstance(event, BaseException):
                raise self._failed(event)
            return request, event

    def _failed(self, error: BaseException) -> BaseException:
        """End all requests -> the error, as another one where it would say to the reader that nothing more comes."""
        if isinstance(error, StopIteration | Empty):
            cause, error = error, RuntimeError(f"a request failed with {type(error).__name__}")
            error.__cause__ = cause
        self._error = error
        self._end("failed")
        return error

    def __enter__(self) -> "Submission":
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
