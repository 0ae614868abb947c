"""How many nodes of the drafted trees a step verifies: chosen ahead of each step, from how long steps take here and
from what the rows' last steps accepted.

Nodes of a tree come in an order in which its first n nodes are a tree, too. A step reports the nodes that it accepted,
and the next node that it would have, had it been verified: so a row that verifies nothing still tells whether its
drafts would hit, and no step is spent on trying. Letters: N nodes of a drafted tree.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..report import RowReport
from .session import Session
from .step_times import StepTimes, keep_times, kept_or_measured

Floats = NDArray[np.float64]

RUNGS = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
RECENT = 1 / 16  # share of a step in what is expected of its row, and more in the row's first steps
MANY = 1 / 256  # and in what is expected of a new row
BELIEF = 4.0  # steps that outweigh what is assumed before anything was seen
NEIGHBOUR = 32  # one step in so many is of the next rung up or down, in turn, to see how long it takes
CHECK_STEPS = 2048  # steps between two looks at whether the kept times are wrong


def rungs_up_to(nodes: int) -> tuple[int, ...]:
    """The numbers of nodes that are chosen from: few, for each is a size to measure, and on a GPU a graph."""
    return (*(rung for rung in RUNGS if rung < nodes), nodes)


class Followers:
    """How likely each node is accepted where a lower one is, of all rows: [N, N]."""

    def __init__(self, nodes: int):
        place = np.arange(nodes)
        apart = place - place[:, None] - 1
        self._seen = np.full((nodes, nodes), BELIEF)
        self._hits = BELIEF * np.where(apart >= 0, 0.25 * 0.75 ** np.maximum(apart, 0), 0.0)

    def learn(self, path: Sequence[int], known: int) -> None:
        """Take in a step that accepted the path, places from 0 on, and of which the first `known` places are known."""
        for at, place in enumerate(path):
            self._seen[place, :known] += 1
            self._hits[place, list(path[at + 1 :])] += 1

    def of(self, place: int) -> Floats:
        """[N]: of each node, 0 up to the place itself."""
        share: Floats = self._hits[place] / self._seen[place]
        return share


class Ladder:
    """The rungs, and what is known for the choice between them. A ladder of one rung chooses that."""

    def __init__(self, rungs: Sequence[int], times: StepTimes | None = None, kept: Path | None = None):
        """rungs: numbers of nodes, rising. times: of the same rungs, needed where there are several. kept: where they
        are kept."""
        self.rungs, self._places = tuple(rungs), np.array(rungs)
        self._times, self._kept, self._steps = times, kept, 0
        nodes = self.rungs[-1]
        self._all = RowDrafts(0.5 * 0.75 ** np.arange(nodes, dtype=np.float64), MANY)
        self._followers = Followers(nodes)

    def row(self) -> "RowDrafts":
        """What is known of a new row."""
        return RowDrafts(self._all.expected.copy(), RECENT)

    def choose(self, rows: int, drafts: "Sequence[RowDrafts]", length: float) -> int:
        """The rung of the next step, of `rows` rows in all: the most tokens per second that can be expected of those
        that run. length: tokens in their caches on average."""
        if self._times is None:
            return self.rungs[-1]
        accepted = np.cumsum([0.0, *np.sum([each.expected for each in drafts], axis=0)])[self._places]
        tokens = len(drafts) + accepted
        best = int(np.argmax(tokens / self._times.seconds(rows, length)))
        self._steps += 1
        if self._steps % NEIGHBOUR == 0:
            best += 1 if best == 0 or (self._steps // NEIGHBOUR % 2 and best + 1 < len(self.rungs)) else -1
        return self.rungs[best]

    def timed(self, rows: int, rung: int, length: float, seconds: float) -> None:
        """Take in how long a step took, its arguments as for `choose`."""
        if self._times is None:
            return
        self._times.observe(rows, rung, length, seconds)
        if self._kept is not None and self._steps % CHECK_STEPS == 0 and self._times.wrong:
            keep_times(self._times, self._kept)

    def learn(self, drafts: "RowDrafts", report: RowReport) -> None:
        """Take in what a step did to a row."""
        if self._times is None:
            return
        path = [accepted.node - 1 for accepted in report.path]
        known = self.rungs[-1]
        if report.missed:
            path.append(report.missed - 1)
            known = report.missed
        self._followers.learn(path, known)
        accepted = np.zeros(self.rungs[-1])
        if report.missed:  # what lies below it was not verified
            accepted = self._followers.of(path[-1]).copy()
        accepted[path] = 1.0
        drafts.take(accepted)
        self._all.take(accepted)


class RowDrafts:
    """What is expected of a row's drafts: how likely each node is accepted, [N] float64."""

    def __init__(self, expected: Floats, least: float):
        """least: share of a new step in it, after the first ones."""
        self.expected, self._least, self._weight = expected, least, BELIEF

    def take(self, accepted: Floats) -> None:
        """Take in the nodes [N] that a step accepted: 1, or how likely it would have."""
        self._weight += 1
        self.expected += max(1 / self._weight, self._least) * (accepted - self.expected)


def make_ladder(session: Session, nodes: int | str, identity: str, report: Callable[[str], None]) -> Ladder:
    """The ladder that a user asks for (see `engine.load`) over an idle session. Raises InputError."""
    most = session.spec.nodes
    if nodes == "auto":
        fixed = most == 0 or not session.any_nodes or session.spec.config.get("forced_acceptance") is not None
        if fixed:
            return Ladder([most])
        rungs = rungs_up_to(most)
        return Ladder(rungs, *kept_or_measured(session, rungs, identity, report))
    if nodes == "all":
        return Ladder([most])
    if not isinstance(nodes, int) or isinstance(nodes, bool) or not 0 <= nodes <= most:
        raise InputError(f"nodes: expected auto, all, or 0 to the {most} that this engine drafts, got {nodes!r}")
    if nodes != most and not session.any_nodes:
        raise InputError(f"nodes: expected auto, all, or {most}, as an engine of this backend verifies, got {nodes}")
    return Ladder([nodes])
