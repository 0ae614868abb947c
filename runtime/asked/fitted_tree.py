"""A drafted tree, fitted to what a request may say: without what it forbids, and with what it forces."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...report import SCORE_STEPS, DraftedTree


class Node(NamedTuple):
    """A node of a fitted tree. after: the drafted node that it comes behind, itself or the last one above it, 0 for the
    root; number: of the nodes as they were found, from 1 on; parent: the number of its parent; origin: the drafted node
    that it is, 0 for a forced one. Nodes in their order are sorted."""

    after: int
    number: int
    parent: int
    token: int
    origin: int


@dataclass(frozen=True)
class FittedTree:
    """origins: of each node but the root the drafted one that it is, 0 for a forced one. certain: how many of the first
    nodes are certain to be accepted."""

    tree: DraftedTree
    origins: list[int]
    certain: int

    @classmethod
    def of(cls, root: int, nodes: Sequence[Node]) -> "tuple[FittedTree, dict[int, int]]":
        """The tree of a root's token and nodes in their order, each behind its parent; and the place of each number in
        it."""
        places = {0: 0} | {node.number: place for place, node in enumerate(nodes, 1)}
        tree = DraftedTree([root, *(node.token for node in nodes)], [-1, *(places[node.parent] for node in nodes)])
        return cls(tree, [node.origin for node in nodes], sum(node.after == 0 for node in nodes)), places

    def scores(self, drafted: Sequence[int]) -> list[int]:
        """Scores of its nodes, and 0 for places without one, given those of the drafted ones, see `Report`: a forced
        node is as likely as its parent."""
        known = [SCORE_STEPS]
        for origin, parent in zip(self.origins, self.tree.parents[1:], strict=True):
            known.append(drafted[origin - 1] if origin else known[parent])
        return known[1:] + [0] * (len(drafted) - len(self.origins))


# The output so far, the tree that was drafted for the coming step, and the most nodes below the root and levels.
FitTree = Callable[[Sequence[int], DraftedTree, int, int], FittedTree]
