"""In-flight batching: any number of threads submit requests; one worker thread admits them to rows and replays steps.

The worker lives as long as there is work. It alone touches the session, so a step serves the requests of all callers,
and a caller that is interrupted, raises or goes away disturbs nobody. Callers with waiting requests are served in turn,
one request each, so a long list of prompts does not keep a single one waiting.
"""

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence

from ..errors import EngineError, InputError
from .allowed_tokens import checked
from .request import Event, Request
from .session import Session, rows_for
from .submission import Caller, Submission


class _Running:
    """A request that has a row, and its output: the worker's own copy, ahead of what was read."""

    def __init__(self, caller: Caller, request: Request, admitted: float, prefilled: float):
        self.caller, self.request, self.admitted, self.prefilled = caller, request, admitted, prefilled
        self.output: list[int] = []

    @property
    def ended(self) -> bool:
        """Whether nobody wants more of it: its caller is gone, or read up to a stop string."""
        return self.caller.cancelled or self.request.finish_reason is not None


class Scheduler:
    """Requests in, tokens out, over the rows of one session."""

    def __init__(self, session: Session):
        self._session: Session | None = session
        self._lock = threading.Lock()  # of what follows
        self._callers: deque[Caller] = deque()  # those with requests that wait for a row, the next to be served first
        self._worker: threading.Thread | None = None
        self._closed = False
        self._broken: BaseException | None = None  # what the worker failed with, outside of a prefill and a step
        _SCHEDULERS.add(self)

    @property
    def session(self) -> Session:
        """The session. Raises EngineError after `close`."""
        if self._session is None or self._broken is not None:
            raise self._refusal() from self._broken
        return self._session

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
                self._callers.append(caller)
                self._start()
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

    def close(self) -> None:
        """Cancel everything, wait for the step under way, and let go of the session."""
        with self._lock:
            self._closed, worker = True, self._worker
        if worker is not None:
            worker.join()
        self._session = None

    def _work(self) -> None:
        """The worker: admit, step, hand out, until there is nothing to do."""
        rows: dict[int, _Running] = {}
        try:
            self.session.enter_thread()
            while self._go_on(rows):
                self._admit(rows)
                self._compact(rows)
                self._mask(rows)
                self._step(rows)
        except BaseException as error:  # not of a prefill or a step: the session can no longer be trusted
            with self._lock:
                self._closed, self._worker, self._broken = True, None, error
            for running in rows.values():
                running.caller.events.put(error)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Raise an error to all callers that wait for a row."""
        with self._lock:
            for caller in self._callers:
                caller.waiting.clear()
                caller.events.put(error)
            self._callers.clear()

    def _go_on(self, rows: dict[int, _Running]) -> bool:
        """Release what has ended -> whether there is work; if not, the worker is no longer this one."""
        with self._lock:
            if self._closed:
                for caller in {*self._callers, *(running.caller for running in rows.values())}:
                    caller.cancel()
            self._callers = deque(caller for caller in self._callers if caller.waiting and not caller.cancelled)
            for row in [row for row, running in rows.items() if running.ended]:
                self._release(rows, row)
            if not rows and not self._callers:
                self._worker = None
            return self._worker is threading.current_thread()

    def _admit(self, rows: dict[int, _Running]) -> None:
        """Give the free rows to the callers that wait, one request each in turn."""
        if not rows and not self.session.free_rows:
            self._fail(EngineError("rows: expected a free one, got all of them admitted outside of the engine's calls"))
        while self.session.free_rows:
            with self._lock:
                if not self._callers or self._closed:
                    return
                caller = self._callers.popleft()
                if caller.cancelled or not caller.waiting:
                    continue
                request = caller.waiting.popleft()
                if caller.waiting:
                    self._callers.append(caller)
            admitted = time.perf_counter()
            try:
                row = self.session.admit(request.prompt, request.limit, request.stop_ids, request.controls)
            except BaseException as error:
                caller.waiting.clear()
                caller.events.put(error)
                continue
            rows[row] = _Running(caller, request, admitted, time.perf_counter())

    def _compact(self, rows: dict[int, _Running]) -> None:
        """Where few rows are in use, but high ones, move them down: a step costs what its rows cost."""
        most = self.session.spec.max_batch
        for source, target in self.session.compact(rows_for(most - self.session.free_rows, most)).items():
            rows[target] = rows.pop(source)

    def _mask(self, rows: dict[int, _Running]) -> None:
        """Ask those who have a say what may follow in the coming step. If that fails, it fails for the one alone."""
        for row, running in list(rows.items()):
            if running.request.allowed_tokens is None:
                continue
            tree = self.session.tree(row)
            try:
                bits = running.request.allowed_tokens(tuple(running.output), tree)
                bits = checked(bits, tree, self.session.spec.vocab_size)
            except BaseException as error:
                self._release(rows, row)
                running.caller.events.put((running.request, error))
                continue
            self.session.allow(row, bits)

    def _release(self, rows: dict[int, _Running], row: int) -> None:
        """Take a request out of its row."""
        self.session.release(row)
        del rows[row]

    def _step(self, rows: dict[int, _Running]) -> None:
        """One step of all rows. If it fails, it fails for all of them."""
        if not rows:
            return
        try:
            reports = self.session.step()
        except BaseException as error:
            for row in list(rows):
                rows[row].caller.events.put((rows[row].request, error))
                self._release(rows, row)
            return
        now = time.perf_counter()
        for row, running in list(rows.items()):
            report = reports[row]
            running.output += report.tokens
            if report.finish:
                self._release(rows, row)
            running.caller.events.put((running.request, Event(report, running.admitted, running.prefilled, now)))


_SCHEDULERS: "weakref.WeakSet[Scheduler]" = weakref.WeakSet()


def _refuse_after_fork() -> None:
    """The worker stays in the parent, its step half done."""
    for scheduler in list(_SCHEDULERS):
        scheduler._lock = threading.Lock()
        if scheduler._worker is not None:
            scheduler._closed, scheduler._worker = True, None
            scheduler._broken = RuntimeError("this process was forked while the engine was running")


os.register_at_fork(after_in_child=_refuse_after_fork)


@atexit.register
def _close_all() -> None:
    """A worker in the middle of a step must not outlive the interpreter."""
    for scheduler in list(_SCHEDULERS):
        scheduler.close()
