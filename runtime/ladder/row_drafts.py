"""What is expected of a row's drafts, from what the last steps accepted and from how sure the drafter is.

Letters: N nodes of a drafted tree.
"""

from collections.abc import Sequence
from operator import add

from ...report import CHEAP, NOTHING, SCORE_STEPS, WHOLE

BELIEF = 4.0  # steps that outweigh what is assumed before anything was seen
STALE = 1 / 4  # most of what the first step of its kind after a while counts
ALIKE = 1 / 2  # what a surprise of trees of one kind says of those of the other
SURENESS = 32  # kinds of nodes by their score


class Followers:
    """How likely each node is accepted where a lower one is, of all rows: [N, N]."""

    def __init__(self, nodes: int):
        self._seen = [[BELIEF] * nodes for _ in range(nodes)]
        self._hits = [
            [BELIEF * 0.25 * 0.75 ** (place - lower - 1) * (place > lower) for place in range(nodes)]
            for lower in range(nodes)
        ]

    def learn(self, path: Sequence[int], known: int) -> None:
        """Take in a step that accepted the path, places from 0 on, and of which the first `known` places are known."""
        for at, place in enumerate(path):
            seen, hits = self._seen[place], self._hits[place]
            seen[:known] = [times + 1 for times in seen[:known]]
            for higher in path[at + 1 :]:
                hits[higher] += 1

    def of(self, place: int) -> list[float]:
        """[N]: of each node, 0 up to the place itself."""
        return [hits / seen for hits, seen in zip(self._hits[place], self._seen[place], strict=True)]


class Sureness:
    """How likely a node is accepted, by the score that its drafter gives it: drafters are too sure or too careful."""

    def __init__(self) -> None:
        self._seen = [BELIEF] * SURENESS
        self._hits = [BELIEF * (kind + 0.5) / SURENESS for kind in range(SURENESS)]

    def of(self, scores: Sequence[int]) -> list[float]:
        """[N]: of nodes with these scores, see `Report`."""
        return [self._hits[kind] / self._seen[kind] for kind in map(self._kind, scores)]

    def learn(self, scores: Sequence[int], path: Sequence[int]) -> None:
        """Take in a step of which the nodes with these scores are known, the first ones of a tree, and those at the
        places of the path were accepted."""
        for place, kind in enumerate(map(self._kind, scores)):
            self._seen[kind] += 1
            self._hits[kind] += place in path

    @staticmethod
    def _kind(score: int) -> int:
        return min(max(score, 0) * SURENESS // SCORE_STEPS, SURENESS - 1)  # that of a NaN may be anything


def sureness() -> dict[str, Sureness]:
    """Statistics before anything was seen, for each kind that drafts."""
    return {WHOLE: Sureness(), CHEAP: Sureness()}


class RowDrafts:
    """What is expected of a row's drafts: how likely each node is accepted, [N], by what drafted it. drafted: what
    drafted the row's tree; a new row has none. scores: of this tree, see `Report`, as far as they were reported.
    certain: how many of its first nodes a grammar forces. sureness: what such scores mean, by what drafted. source:
    what is expected of new rows that are like it."""

    def __init__(
        self,
        expected: dict[str, list[float]],
        sureness: dict[str, Sureness],
        least: float,
        source: "RowDrafts | None" = None,
    ):
        """least: share of a new step in it, after the first ones."""
        self.expected, self.sureness, self.source, self._least = expected, sureness, source, least
        self.drafted, self.scores, self.certain = NOTHING, list[int](), 0
        self._seen, self._steps, self._last = {WHOLE: BELIEF, CHEAP: BELIEF}, 0, {WHOLE: 0, CHEAP: 0}

    def copy(self, least: float, sureness: dict[str, Sureness] | None = None) -> "RowDrafts":
        """Drafts that begin with what is expected here, which is their source. sureness: one of their own."""
        expected = {kind: list(expected) for kind, expected in self.expected.items()}
        return RowDrafts(expected, sureness or self.sureness, least, self)

    def likely(self) -> list[float]:
        """How likely each node of the row's tree is accepted, by its score where there is one: [N]."""
        likely = self.sureness[self.drafted].of(self.scores) if self.scores else self.expected[self.drafted]
        return [1.0] * self.certain + likely[self.certain :]

    def skip(self) -> None:
        """Take in a step for which nothing was drafted."""
        self._steps += 1

    def take(self, drafted: str, accepted: Sequence[float]) -> None:
        """Take in the nodes [N] that a step accepted: 1, or how likely it would have. A step of a kind that was not
        seen for a while stands for those that were left out: after 3 steps of another kind it weighs 4/16, not 1/16."""
        self._steps += 1
        self._seen[drafted] += 1
        share = max(1 / self._seen[drafted], self._least)
        left_out = self._steps - self._last[drafted] - 1
        self._last[drafted] = self._steps
        share = min((1 + left_out) * share, max(share, STALE))
        own, other = self.expected[drafted], self.expected[CHEAP if drafted == WHOLE else WHOLE]
        surprises = [share * (value - before) for value, before in zip(accepted, own, strict=True)]
        own[:] = map(add, own, surprises)
        moved = [before + ALIKE * surprise for before, surprise in zip(other, surprises, strict=True)]
        other[:] = [0.0 if each < 0.0 else 1.0 if each > 1.0 else each for each in moved]
