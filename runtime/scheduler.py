"""In-flight batching: any number of threads submit requests; one worker thread admits them to rows and replays steps.

The worker lives as long as there is work. It alone touches the session (`rows.Rows`), so a step serves the requests of
all callers, and a caller that is interrupted, raises or goes away disturbs nobody. Callers with waiting requests are
served in turn, one request each, so a long list of prompts does not keep a single one waiting.
"""

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import EngineError, InputError
from .asked.prompt import at_least_one
from .asked.request import Request
from .kv_events import KVEvents
from .ladder.ladder import Ladder
from .prefix_cache import BLOCK, PrefixCache
from .rows import Rows, TakenRequest
from .session import Session
from .submission import Caller, Submission


class Occupancy(NamedTuple):
    """waiting: requests that wait for a row. running: those that have one; their prompts may be in prefill."""

    waiting: int
    running: int


class CacheUse(NamedTuple):
    """How full the caches are."""

    tokens: int  # in the caches of taken rows
    slots: int  # in the caches of all rows
    blocks: int  # kept by the prefix cache
    most_blocks: int  # that it can keep; 0: there is none
    block_tokens: int = BLOCK  # tokens of a block


class Scheduler:
    """Requests in, tokens out, over the rows of one session."""

    def __init__(
        self,
        session: Session,
        prefix_cache_bytes: int = 0,
        prefill_per_step: int | None = None,
        ladder: Ladder | None = None,
        kv_events: bool = False,
    ):
        """ladder: how many nodes a step verifies, all by default; others: see `load`. Raises InputError."""
        most = at_least_one(prefill_per_step, session.spec.prefill_chunk, "prefill_per_step")
        budget = at_least_one(prefix_cache_bytes or None, 0, "prefix_cache_bytes")
        if kv_events and not budget:
            raise InputError("kv_events: expected a prefix cache beside it, got prefix_cache_bytes 0")
        self.kv_events = KVEvents() if kv_events else None
        prefixes = PrefixCache(session, budget, self.kv_events) if budget else None
        ladder = ladder or Ladder([session.spec.nodes])
        self._rows: Rows | None = Rows(session, max(most, 2), prefixes, ladder)  # of the worker alone
        self._lock = threading.Lock()  # of what follows
        self._callers: deque[Caller] = deque()  # those with requests that wait for a row, the next to be served first
        self._worker: threading.Thread | None = None
        self._closed = False
        self._broken: BaseException | None = None  # what the worker failed with, outside of a prefill and a step
        _SCHEDULERS.add(self)

    @property
    def session(self) -> Session:
        """The session. Raises EngineError after `close`."""
        rows = self._rows  # which `close` takes away, in another thread
        if rows is None or self._broken is not None:
            raise self._refusal() from self._broken
        return rows.session

    @property
    def broken(self) -> BaseException | None:
        """What ended the worker for good, so that no request can run any more; None where nothing did."""
        with self._lock:
            worker = self._worker
            if self._broken is not None or worker is None or worker.is_alive():
                return self._broken
        self._break(RuntimeError("the engine's thread has ended"))  # while it fell, maybe: it never ends with work left
        return self._broken

    @property
    def occupancy(self) -> Occupancy:
        """What there is to do; nothing after `close`."""
        with self._lock:
            rows = self._rows
            if rows is None or self._broken is not None:
                return Occupancy(0, 0)
            waiting = sum(len(caller.waiting) for caller in self._callers if not caller.cancelled)
            return Occupancy(waiting, rows.count)

    @property
    def cache_use(self) -> CacheUse:
        """How full the caches are, from any thread; nothing after `close`."""
        rows = self._rows
        if rows is None:
            return CacheUse(0, 0, 0, 0)
        spec, prefixes = rows.session.spec, rows.prefixes
        blocks, most = (prefixes.blocks, prefixes.most_blocks) if prefixes is not None else (0, 0)
        return CacheUse(rows.tokens, spec.max_batch * spec.max_seq_len, blocks, most)

    def submit(self, requests: Sequence[Request]) -> Submission:
        """Queue requests. Raises EngineError after `close`, InputError for a request that was submitted before."""
        if any(request.submitted for request in requests) or len({*map(id, requests)}) < len(requests):
            raise InputError("requests: expected new ones, got one that was submitted before")
        caller = Caller(requests)
        submission = Submission(caller, requests)
        with self._lock:
            if self._closed:
                raise self._refusal() from self._broken
            for request in requests:
                request.submitted = time.perf_counter()
            if requests:
                self.session.leave_thread()
                self._start()
                self._callers.append(caller)
        return submission

    def _start(self) -> None:
        """Have a worker. The lock is held."""
        if self._worker is None:
            worker = threading.Thread(target=self._work, name="specstep", daemon=True)
            worker.start()
            self._worker = worker  # it waits for the lock before it looks whether it is the worker

    def _refusal(self) -> EngineError:
        """Why nothing can be submitted."""
        got = "one that was closed" if self._broken is None else f"{type(self._broken).__name__}: {self._broken}"
        return EngineError(f"engine: expected an open engine, got {got}; load it again")

    def close(self) -> Session | None:
        """Cancel everything, wait for the step under way, and let go of the session -> the session, which the caller
        closes; None where it was closed before, or failed."""
        with self._lock:
            self._closed, worker = True, self._worker
        if worker is not None:
            worker.join()
        rows, self._rows = self._rows, None
        if rows is None:
            return None
        if self._broken is not None:
            rows.session.close()
            return None
        return rows.session

    def _work(self) -> None:
        """The worker: prefill, step, hand out, until there is nothing to do."""
        rows = self._rows
        assert rows is not None  # `close` waits for the worker
        try:
            rows.session.enter_thread()
            while self._go_on(rows):
                rows.prefill(lambda: self._take(rows))
                rows.step(awaited=bool(self._callers))
        except BaseException as error:  # not of a prefill or a step: the session can no longer be trusted
            self._break(error)

    def _break(self, error: BaseException) -> None:
        """Take no more requests, and raise an error to all callers."""
        with self._lock:
            self._closed, self._worker, self._broken = True, None, error
        for taken in self._rows.taken if self._rows else ():
            taken.caller.events.put(error)
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Raise an error to all callers that wait for a row."""
        with self._lock:
            for caller in self._callers:
                caller.waiting.clear()
                caller.events.put(error)
            self._callers.clear()

    def _go_on(self, rows: Rows) -> bool:
        """Release what has ended -> whether there is work; if not, the worker is no longer this one."""
        with self._lock:
            if self._closed:
                for caller in {*self._callers, *(taken.caller for taken in rows.taken)}:
                    caller.cancel()
            self._callers = deque(caller for caller in self._callers if caller.waiting and not caller.cancelled)
        rows.release_ended()
        with self._lock:
            if not rows.taken and not self._callers:
                self._worker = None
            if self._worker is not threading.current_thread():
                return False
        by_hand = rows.session.spec.max_batch - rows.session.free_rows
        if not rows.taken and by_hand:  # which would be stepped and moved with the others
            got = f"{by_hand} admitted outside of the engine's calls"
            self._fail(EngineError(f"rows: expected all of them free, got {got}; release them"))
        return True

    def _take(self, rows: Rows) -> TakenRequest | None:
        """Take the next request in turn off the queue, to be prefilled, if one waits."""
        with self._lock:
            while self._callers and not self._closed:
                caller = self._callers.popleft()
                if caller.cancelled or not caller.waiting:
                    continue
                request = caller.waiting.popleft()
                taken = rows.take(caller, request)
                if caller.waiting:
                    self._callers.append(caller)
                return taken
        return None


_SCHEDULERS: "weakref.WeakSet[Scheduler]" = weakref.WeakSet()


def _refuse_after_fork() -> None:
    """The worker stays in the parent, its step half done."""
    for scheduler in list(_SCHEDULERS):
        scheduler._lock = threading.Lock()
        if scheduler._worker is not None:
            scheduler._closed, scheduler._worker = True, None
            scheduler._broken = RuntimeError("this process was forked while the engine was running")
            taken = scheduler._rows.taken if scheduler._rows is not None else []
            for caller in {*scheduler._callers, *(each.caller for each in taken)}:
                caller.forked(scheduler._refusal())
            scheduler._callers.clear()


os.register_at_fork(after_in_child=_refuse_after_fork)


@atexit.register
def _close_all() -> None:
    """A worker in the middle of a step must not outlive the interpreter."""
    for scheduler in list(_SCHEDULERS):
        session = scheduler.close()
        if session is not None:
            session.close()
