"""The rows of a session and the requests that have them: what the scheduler's worker does in one turn.

A turn prefills a bounded part of the prompts that wait, and steps. One prompt is prefilled at a time, in a row behind
those that run, which no step touches.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from ..report import NOTHING, RowReport
from .asked.request import Event, Request
from .ladder.ladder import Ladder
from .ladder.row_drafts import RowDrafts
from .prefix_cache import Chain, PrefixCache
from .session import Launched, LostRowError, Session, rows_for
from .submission import Caller


class TakenRequest:
    """A request that was taken off the queue, and its output: the worker's own copy, ahead of what was read."""

    def __init__(self, caller: Caller, request: Request, drafts: RowDrafts):
        """drafts: what is expected of its drafts."""
        self.caller, self.request, self.drafts = caller, request, drafts
        self.admitted = self.prefilled = time.perf_counter()
        self.output: list[int] = []
        self.row: int | None = None
        self.cached = 0  # tokens of the prompt that needed no prefill
        self.kept: Chain = []  # what of it is in the prefix cache

    @property
    def ended(self) -> bool:
        """Whether nobody wants more of it: its caller is gone, or read up to a stop string."""
        return self.caller.cancelled or self.request.finish_reason is not None

    def fail(self, error: BaseException) -> None:
        """Raise an error to its caller, and forget what else that one waits for."""
        self.caller.waiting.clear()
        self.caller.events.put(error)


class BegunStep(NamedTuple):
    """A step that was begun, and for whom."""

    launched: Launched  # as the session began it
    running: dict[int, TakenRequest]  # requests by row
    length: float  # mean tokens in their caches
    begin: float  # when, seconds of perf_counter
    captured: bool  # the first of its size, which takes longer


class Rows:
    """Requests in the rows of a session. running: by their row. filling: the one whose prompt is being prefilled."""

    def __init__(self, session: Session, prefill_per_step: int, prefixes: PrefixCache | None, ladder: Ladder):
        """prefill_per_step: most prompt tokens of a turn while others decode. prefixes: keeps what was served. ladder:
        says how many nodes a step verifies."""
        self.session, self.prefill_per_step, self.prefixes, self.ladder = session, prefill_per_step, prefixes, ladder
        self.running: dict[int, TakenRequest] = {}
        self.filling: TakenRequest | None = None
        self._next: BegunStep | None = None  # a step that was begun before the last one was read
        self._read = 0.0  # when the last step was read

    @property
    def taken(self) -> list[TakenRequest]:
        """All requests that were taken off the queue and have not ended."""
        return [*self.running.values(), *([self.filling] if self.filling else [])]

    @property
    def count(self) -> int:
        """How many these are, from any thread."""
        # Read in this order: a request moves from the first to the second.
        return (self.filling is not None) + len(self.running)

    @property
    def tokens(self) -> int:
        """How many lie in their caches, from any thread."""
        return sum(self.session.lengths[taken.row] for taken in self.taken if taken.row is not None)

    def release_ended(self) -> None:
        """Free the rows of requests that nobody wants more of."""
        for row in [row for row, taken in self.running.items() if taken.ended]:
            self._end(row)
        if self.filling is not None and self.filling.ended:
            if self.filling.row is not None:
                self.session.release(self.filling.row)
            self.filling = None

    def take(self, caller: Caller, request: Request) -> TakenRequest:
        """Make a request the one whose prompt is prefilled next; none may be `filling`."""
        self.filling = TakenRequest(caller, request, self.ladder.row(request.temperature))
        return self.filling

    def prefill(self, take_next: Callable[[], TakenRequest | None]) -> None:
        """Prefill prompts, one after the other, as far as the coming step may wait for them. If that fails, it fails
        for the one alone, unless its row is lost. take_next: takes the next request of the queue by `take`, if one
        waits."""
        spent = 0
        if self._next is not None:  # its rows stay where they are
            return
        while taken := self.filling or (take_next() if self.session.free_rows else None):
            if taken.row is None:
                self._compact(len(self.running))  # so that its row will be behind them
            try:
                row = self._begin(taken) if taken.row is None else taken.row
                most = self.prefill_per_step if self.running else self.session.spec.prefill_chunk
                size = self.session.next_chunk(row, most)
                if spent and spent + size > most:
                    return
                filled = self.session.fill(row, most)
                self._keep(taken)
            except LostRowError:
                raise
            except BaseException as error:
                if taken.row is not None:
                    self.session.release(taken.row)
                self.filling = None
                taken.fail(error)
                continue
            spent += size
            if filled:
                taken.prefilled = time.perf_counter()
                self.running[row], self.filling = taken, None

    def _begin(self, taken: TakenRequest) -> int:
        """Give a request a row, with what is kept of its prompt -> the row."""
        asked = taken.request
        row = taken.row = self.session.begin(asked.prompt, asked.limit, asked.stop_ids, asked.controls)
        if self.prefixes is not None:
            taken.cached = self.prefixes.recall(row, asked.prefix_scope, asked.prompt)
        return row

    def _keep(self, taken: TakenRequest, ends: bool = False, settled: bool = True) -> None:
        """Keep what a request has in its row, for others that begin like it. ends, settled: see `PrefixCache.keep`."""
        if self.prefixes is not None and taken.row is not None:
            asked, count = taken.request, self.session.processed(taken.row) + 1
            tokens = [*asked.prompt, *taken.output] if taken.output else asked.prompt  # one chunk after the other
            count = min(count, len(tokens))
            given = taken.row, asked.prefix_scope, tokens, count, taken.kept
            taken.kept = self.prefixes.keep(*given, ends, settled)

    def _compact(self, rows: int) -> None:
        for source, target in self.session.compact(rows).items():
            self.running[target] = self.running[source]
            self.running[target].row = target
            del self.running[source]

    def step(self, awaited: bool) -> None:
        """One step of all that run, in as few rows as hold them. If it fails, it fails for all of them. awaited:
        whether requests wait for a row."""
        step, self._next = self._next, None
        if not self.running:  # nor is there anybody to read a step that was begun
            return
        if step is None:
            self._compact(rows_for(len(self.running), self.session.spec.max_batch))
        try:
            step = step or self._begin_step()
            if step is None:
                return
            if self._may_overlap(step, awaited):
                self._next = self._begin_step(ahead=True)
            still = [row for row, taken in step.running.items() if self.running.get(row) is taken]
            reports = self.session.end_step(step.launched, still)
        except BaseException as error:
            self._next = None
            for row in list(self.running):
                self._fail(row, error)
            return
        self._hand_out(step, reports)

    def _begin_step(self, ahead: bool = False) -> BegunStep | None:
        """Begin a step, if anybody is left for one. ahead: whether the last one's report was not read yet."""
        self._fit()
        if not self.running:
            return None
        size, length = self.session.next_size()[0], self._length
        nodes, draft = self.ladder.choose(size, [taken.drafts for taken in self.running.values()], length, ahead)
        self._mask(nodes)
        if not self.running:
            return None
        captured, begin = self.session.captured, time.perf_counter()
        launched = self.session.begin_step(nodes, draft)
        return BegunStep(launched, dict(self.running), length, begin, self.session.captured > captured)

    def _may_overlap(self, step: BegunStep, awaited: bool) -> bool:
        """Whether the next step may begin before this one is read. Not if a prompt fills or waits for a free row, fewer
        rows would do, a drafter owes a catch-up, a mask needs the tokens, or what drafts has changed."""
        if (
            self.filling is not None
            or (awaited and self.session.free_rows)
            or rows_for(len(self.running), self.session.spec.max_batch) < step.launched.rows
            or not self.session.may_overlap(step.launched)
        ):
            return False
        return all(
            taken.request.allowed_tokens is None and not taken.ended and taken.drafts.drafted == step.launched.draft
            for taken in self.running.values()
        )

    def _hand_out(self, step: BegunStep, reports: dict[int, RowReport]) -> None:
        """Learn from a step, and tell those who wait for its tokens."""
        launched, now = step.launched, time.perf_counter()
        if not step.captured:
            seconds = now - max(step.begin, self._read)
            self.ladder.timed(launched.rows, launched.nodes, launched.draft, step.length, seconds)
        self._read = now
        for row, report in reports.items():
            taken = self.running[row]
            self.ladder.learn(taken.drafts, report, launched.draft)
            taken.output += report.tokens
            try:
                output = taken.request.output(report)
            except BaseException as error:  # a tokenizer's
                self._fail(row, error)
                continue
            if output.finish:
                self._end(row, bool(report.finish))
            told = Event(report, taken.admitted, taken.prefilled, now, taken.cached, launched.nodes, output)
            taken.caller.events.put((taken.request, told))

    @property
    def _length(self) -> float:
        """Tokens in the caches of those that run, on average."""
        return sum(self.session.lengths[row] for row in self.running) / len(self.running)

    def _fit(self) -> None:
        """Have those whose grammar prunes and forces nodes verify a tree that fits it. If that fails, it fails for the
        one alone."""
        spec = self.session.spec
        for row, taken in list(self.running.items()):
            if taken.request.fit_tree is None or not spec.nodes:
                continue
            drafts, drafted = taken.drafts, self.session.tree(row, 0 if taken.drafts.drafted == NOTHING else None)
            try:
                fitted = taken.request.fit_tree(tuple(taken.output), drafted, spec.nodes, spec.depth)
            except BaseException as error:
                self._fail(row, error)
                continue
            self.session.plant(row, fitted.tree)
            drafts.certain = fitted.certain
            drafts.scores = fitted.scores(drafts.scores) if drafts.scores else []

    def _mask(self, nodes: int) -> None:
        """Ask those who have a say what may follow the nodes of the coming step. If that fails, it fails for the one
        alone."""
        for row, taken in list(self.running.items()):
            if taken.request.allowed_tokens is None:
                continue
            tree = self.session.tree(row, nodes)
            try:
                bits = taken.request.allowed_tokens(tuple(taken.output), tree)
            except BaseException as error:
                self._fail(row, error)
                continue
            self.session.allow(row, bits)

    def _fail(self, row: int, error: BaseException) -> None:
        """Raise an error for one request, and free its row."""
        taken = self.running[row]
        self._release(row)
        taken.caller.events.put((taken.request, error))

    def _end(self, row: int, finished: bool = False) -> None:
        """Keep what a row has, and free it. finished: its last step said that it has, so no other takes it further."""
        self._keep(self.running[row], ends=True, settled=finished or self._next is None)
        self._release(row)

    def _release(self, row: int) -> None:
        self.session.release(row)
        del self.running[row]
