"""From what was measured to what is chosen. Nothing is run here.

Nodes of a dynamic tree are in order of score, and a step says which of them it accepts. So one run with the largest
tree tells what every smaller one accepts; what it costs is the time of a step by rows and nodes. How many nodes are
verified the engine chooses as it runs: what is left to choose is the drafter, the depth, top-k, and the most nodes.
"""

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...graphs.tree import DynamicTree
from ...runtime.acceptance import Acceptance

NODES, DEPTH, TOP_K = 31, 7, 4  # of the tree that is measured, or fewer nodes and levels where a drafter scores fewer
CLOSE = 0.99  # of trees of a drafter with nearly the same speed the one that drafts least is taken
WORTH = 1.02  # times the speed of plain decoding: what drafts must bring to be kept


@dataclass(frozen=True)
class DrafterSetup:
    """A drafter and its tree, as options of `build`."""

    drafter: str
    nodes: int
    depth: int
    top_k: int
    tree: str | None = "dynamic"

    def __str__(self) -> str:
        shape = f", up to {self.nodes} nodes, depth {self.depth}, top-k {self.top_k}" if self.nodes else ""
        return f"drafter {label(self.drafter)}{shape}"


def label(drafter: str) -> str:
    """A drafter's name for people: files and folders without the way there."""
    return ",".join(Path(part).name for part in drafter.split(","))


PLAIN = DrafterSetup("none", 0, 0, 1, None)


@dataclass(frozen=True)
class Drafted:
    """What the target accepts of a drafter's largest tree: over all prompts, and over the third of them that it drafts
    best. depth: of that tree; levels: those of it that are scored at a cost. length: mean tokens in a row's cache.
    draft_s: median seconds in which plain modules draft."""

    drafter: str
    depth: int
    levels: int
    acceptance: Acceptance
    easy: Acceptance
    length: float
    draft_s: float


@dataclass(frozen=True)
class Steps:
    """An engine's steps: for each number of rows the seconds of a step of each rung, the first of which verifies no
    drafts, the seconds that drafting takes of each, and those that a step saves which drafts nothing."""

    rungs: tuple[int, ...]
    seconds: Mapping[int, Sequence[float]]
    draft: Mapping[int, float]
    saved: Mapping[int, float]

    def plain(self, rows: int) -> float:
        """Seconds of a step of an engine without a drafter."""
        return self.seconds[rows][0] - self.draft[rows]

    def up_to(self, rows: int) -> "Steps":
        """Those of an engine for so many rows, or as many as were measured."""
        most = min([known for known in self.seconds if known >= rows], default=max(self.seconds))
        return replace(self, seconds={known: times for known, times in self.seconds.items() if known <= most})

    def with_drafts_of(self, share: float) -> "Steps":
        """What they would be if drafting took this share of the time that it takes."""
        gone = {rows: (1 - share) * seconds for rows, seconds in self.draft.items()}
        less = {rows: [each - gone[rows] for each in times] for rows, times in self.seconds.items()}
        draft, saved = ({rows: share * of[rows] for rows in of} for of in (self.draft, self.saved))
        return Steps(self.rungs, less, draft, saved)


@dataclass(frozen=True)
class Expected:
    """What a drafter with a tree brings: for each number of rows its speed, plain decoding being 1, and the nodes that
    its steps verify then."""

    choice: DrafterSetup
    speed: Mapping[int, float]
    nodes: Mapping[int, int]

    @property
    def mean(self) -> float:
        """Geometric, over the numbers of rows."""
        return statistics.geometric_mean(self.speed.values())


def choose(measured: Sequence[tuple[Drafted, Steps]], rows: int) -> tuple[DrafterSetup, Expected]:
    """What an engine for so many rows is built with, and what the best drafter and its tree are expected to bring:
    the choice is PLAIN where that is too little."""
    each = [best_tree(drafted, steps.up_to(rows)) for drafted, steps in measured]
    best = max(each, key=lambda expected: expected.mean)
    return (best.choice if best.mean >= WORTH else PLAIN), best


def best_tree(drafted: Drafted, steps: Steps) -> Expected:
    """The tree with which a drafter is fastest, over all prompts and where drafts hit best, for nodes are chosen as it
    runs; of those that are nearly as fast, one that drafts least. It has as many nodes as ever pay."""
    trees = [[expect(drafted, steps, *shape, easy) for easy in (False, True)] for shape in shapes(drafted.depth)]
    enough = CLOSE * max(statistics.geometric_mean([tree.mean for tree in pair]) for pair in trees)
    close = [pair for pair in trees if statistics.geometric_mean([tree.mean for tree in pair]) >= enough]
    usual, easy = min(close, key=lambda pair: (pair[0].choice.depth, pair[0].choice.top_k))
    nodes = min(max(1, *usual.nodes.values(), *easy.nodes.values()), usual.choice.nodes)
    return replace(usual, choice=replace(usual.choice, nodes=nodes, depth=min(usual.choice.depth, nodes)))


def shapes(deepest: int) -> Iterator[tuple[int, int]]:
    """Depth and top-k of the trees that are judged."""
    return itertools.product(range(1, deepest + 1), range(1, TOP_K + 1))


def most_nodes(depth: int, top_k: int) -> int:
    """How many nodes such a tree can have, of those that are measured."""
    return min(NODES, sum(DynamicTree.level_sizes(depth, top_k)))


def expect(drafted: Drafted, steps: Steps, depth: int, top_k: int, easy: bool = False) -> Expected:
    """What a tree of this depth and top-k brings over all prompts, or over the easy ones, with as many of its nodes as
    pay."""
    acceptance = drafted.easy if easy else drafted.acceptance
    tokens = [acceptance.with_tree(nodes, depth, top_k) for nodes in steps.rungs]
    saved = 1 - min(depth, drafted.levels) / min(drafted.depth, drafted.levels)
    speed, nodes = {}, {}
    for rows, seconds in steps.seconds.items():
        each = [
            count * steps.plain(rows) / (time - saved * steps.draft[rows])
            for count, time in zip(tokens, seconds, strict=True)
        ]
        each[0] = max(each[0], steps.plain(rows) / (seconds[0] - steps.saved[rows]))
        speed[rows] = max(each)
        nodes[rows] = steps.rungs[each.index(speed[rows])]
    return Expected(DrafterSetup(drafted.drafter, most_nodes(depth, top_k), depth, top_k), speed, nodes)
