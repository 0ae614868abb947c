"""How many nodes of the drafted trees a step verifies, and what drafts the next ones: chosen ahead of each step, from
how long steps take here and from what the rows' last steps accepted.

Nodes of a tree come in an order in which its first n nodes are a tree, too. A step reports the nodes that it accepted,
and the next node that it would have, had it been verified: so a row that verifies nothing still tells whether its
drafts would hit. It reports, too, how sure the drafter is of each node of the tree that comes next. What others would
have drafted, with or without a drafter that pauses, a step tells now and then.
Letters: N nodes of a drafted tree.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import truediv
from pathlib import Path
from typing import NamedTuple

from ...errors import InputError
from ...progress import OnProgress
from ...report import CHEAP, NOTHING, WHOLE, RowReport
from ..session import Session
from .measure_steps import keep_times, kept_or_measured
from .row_drafts import Followers, RowDrafts, sureness
from .step_times import StepTimes

RUNGS = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
RECENT = 1 / 16  # share of a step in what is expected of its row, and more in the row's first steps
MANY = 1 / 256  # and in what is expected of a new row
NEIGHBOUR = 32  # at most one step in so many is of the next rung up or down, in turn, to see how long it takes
HOLD = 4  # steps for which it is settled what drafts, while the rows stay: the choice takes time, too
PROBE = 8  # at most one step in so many drafts with more, or less, than seems best, to compare
SPENT = 1 / 400  # share of the tokens per second that each of these may cost
HOTTEST = 2.0  # temperature from which on rows are alike
KEEN = 1.05  # the speed that is reached with scores, over what is expected without
WORTH = 0.01  # share of a step that drafting less must save to be thought of
RETRY_AFTER = 1024  # steps after which what seemed not to save that is tried: a busy moment may have hidden it
CHECK_STEPS = 2048  # steps between two looks at whether the kept times are wrong


class Chosen(NamedTuple):
    """nodes: how many a step verifies, none where nothing drafts. draft: what drafts the next trees, as for
    `Session.step`."""

    nodes: int
    draft: str


def rungs_up_to(nodes: int) -> tuple[int, ...]:
    """The numbers of nodes that are chosen from: few, for each is a size to measure, and on a GPU a graph."""
    return (*(rung for rung in RUNGS if rung < nodes), nodes)


class Ladder:
    """The rungs, and what is known for the choice between them. Without times the highest is chosen, and the lowest
    where no row has drafts."""

    def __init__(self, rungs: Sequence[int], times: StepTimes | None = None, kept: Path | None = None):
        """rungs: numbers of nodes, rising. times: of the same rungs. kept: where they are kept."""
        self.rungs, self._times, self._kept, self._steps = tuple(rungs), times, kept, 0
        self._last = {WHOLE: 0, CHEAP: 0, NOTHING: 0, "neighbour": 0}  # step of each kind
        nodes = self.rungs[-1]
        whole = [0.5 * 0.75**place for place in range(nodes)]
        # What is expected of new rows, by twice their temperature: the more chance decides, the fewer drafts hit.
        nothing = [0.0] * nodes
        expected = {WHOLE: whole, CHEAP: [0.8 * each for each in whole], NOTHING: nothing}
        self._new = {0: RowDrafts(expected, sureness(), MANY)}
        self._followers = Followers(nodes)
        self._up = True  # the next neighbour is the rung above
        self._draft, self._rows, self._left = NOTHING, list[RowDrafts](), 0  # what drafts, for whom, and for how long

    def row(self, temperature: float = 0.0) -> RowDrafts:
        """What is known of a new row: what those of about its temperature accepted."""
        kind = round(2 * min(temperature, HOTTEST))
        if kind not in self._new:
            nearest = min(self._new, key=lambda other: abs(other - kind))
            self._new[kind] = self._new[nearest].copy(MANY, sureness())
        return self._new[kind].copy(RECENT)

    def choose(self, rows: int, drafts: Sequence[RowDrafts], length: float, ahead: bool = False) -> Chosen:
        """What the next step, of `rows` rows in all, does: the most tokens per second that can be expected of those
        that run. length: tokens in their caches on average. ahead: whether it begins before the last step's report was
        learned, which has the scores of its trees."""
        if self._times is None:
            drafted = any(each.drafted != NOTHING or each.certain for each in drafts)
            return Chosen(self.rungs[-1 if drafted else 0], WHOLE if self.rungs[-1] else NOTHING)
        self._steps += 1
        if self._left == 0 or self._rows != drafts:
            seconds = {draft: self._times.seconds(rows, length, draft) for draft in self._times.draft_kinds}
            self._draft, self._left = self._drafts(drafts, seconds)
            self._rows = [*drafts]
        draft = self._draft
        self._left -= 1
        self._last[draft] = self._steps
        if draft == NOTHING or all(each.drafted == NOTHING and not each.certain for each in drafts):
            return Chosen(0, draft)
        tokens = self._tokens([each.expected[each.drafted] for each in drafts])
        times = self._times.seconds(rows, length, draft)
        speed = [*map(truediv, tokens, times)]
        best = speed.index(max(speed))
        beside = best + (1 if best == 0 or (self._up and best + 1 < len(self.rungs)) else -1)
        if self._due("neighbour", NEIGHBOUR, speed[best], speed[beside]):
            self._last["neighbour"], self._up, best = self._steps, not self._up, beside
        elif not ahead and any(each.scores or each.certain for each in drafts):
            # A node pays where it brings more than the time that it takes would bring elsewhere.
            likely, price = self._tokens([each.likely() for each in drafts]), KEEN * speed[best]
            gains = [each - price * its for each, its in zip(likely, times, strict=True)]
            best = gains.index(max(gains))
        return Chosen(self.rungs[best], draft)

    def _drafts(self, drafts: Sequence[RowDrafts], seconds: dict[str, list[float]]) -> tuple[str, int]:
        """What is to draft, and for how many steps: what would bring the most tokens a second if it drafted all trees;
        every now and then, for a step, another, so that what is expected of it stays true. seconds: of each rung."""
        most = (1 - WORTH) * seconds[WHOLE][0]
        for draft, its in seconds.items():
            if draft != WHOLE and its[0] >= most and self._steps - self._last[draft] >= RETRY_AFTER:
                return draft, 1
        speed = {
            draft: max(map(truediv, self._tokens([each.expected[draft] for each in drafts]), its))
            for draft, its in seconds.items()
            if draft == WHOLE or its[0] < most
        }
        best = max(speed, key=lambda draft: speed[draft])
        due = [draft for draft in speed.keys() - {best, NOTHING} if self._due(draft, PROBE, speed[best], speed[draft])]
        return (min(due, key=lambda draft: self._last[draft]), 1) if due else (best, PROBE if best == NOTHING else HOLD)

    def _due(self, what: str, least: int, best: float, other: float) -> bool:
        """Whether it is time for a step that is not expected to be the best, given the speeds of both: the more it
        costs, the more rarely."""
        return self._steps - self._last[what] >= max(least, (1 - other / best) / SPENT)

    def _tokens(self, expected: Sequence[list[float]]) -> list[float]:
        """Tokens of a step for each of the rungs, if such drafts [N] of each row are verified."""
        every = expected[0] if len(expected) == 1 else map(sum, zip(*expected, strict=True))
        up_to = [*accumulate(every, initial=float(len(expected)))]
        return [up_to[rung] for rung in self.rungs]

    def timed(self, rows: int, rung: int, drafted: str, length: float, seconds: float) -> None:
        """Take in how long a step took, its arguments as for `choose`."""
        if self._times is None:
            return
        self._times.observe(rows, rung, drafted, length, seconds)
        if self._kept is not None and self._steps % CHECK_STEPS == 0 and self._times.wrong:
            keep_times(self._times, self._kept)

    def learn(self, drafts: RowDrafts, report: RowReport, drafted: str) -> None:
        """Take in what a step did to a row. drafted: what drafted its next tree."""
        before, drafts.drafted = drafts.drafted, drafted
        if self._times is None:
            return
        scores, drafts.scores = drafts.scores, [] if drafted == NOTHING else report.scores
        if before == NOTHING:
            drafts.skip()
            return
        path = [accepted.node - 1 for accepted in report.path]
        known = self.rungs[-1]
        if report.missed:
            path.append(report.missed - 1)
            known = report.missed
        drafts.sureness[before].learn(scores[:known], path)
        self._followers.learn(path, known)
        # What lies below a missed node was not verified.
        accepted = self._followers.of(path[-1]) if report.missed else [0.0] * self.rungs[-1]
        for place in path:
            accepted[place] = 1.0
        drafts.take(before, accepted)
        if drafts.source is not None:
            drafts.source.take(before, accepted)


def make_ladder(session: Session, nodes: int | str, identity: str, progress: OnProgress) -> Ladder:
    """The ladder that a user asks for (see `load`) over an idle session. Raises InputError."""
    most, least = session.spec.nodes, [0] if session.any_nodes else []
    if nodes == "auto":
        fixed = most == 0 or not session.any_nodes or session.spec.config.get("forced_acceptance") is not None
        if fixed:
            return Ladder(sorted({*least, most}))
        rungs = rungs_up_to(most)
        return Ladder(rungs, *kept_or_measured(session, rungs, identity, progress))
    if nodes == "all":
        return Ladder(sorted({*least, most}))
    if not isinstance(nodes, int) or isinstance(nodes, bool) or not 0 <= nodes <= most:
        raise InputError(f"nodes: expected auto, all, or 0 to the {most} that this engine drafts, got {nodes!r}")
    if nodes != most and not session.any_nodes:
        raise InputError(f"nodes: expected auto, all, or {most}, as an engine of this backend verifies, got {nodes}")
    return Ladder(sorted({*least, nodes}))
