"""A drafted tree, fitted to what a request may say: without what it forbids, with what it forces, and, behind that,
with what is likely."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from ...report import SCORE_STEPS, DraftedTree
from .node_mask import NodeMask

TokenPath = tuple[int, ...]  # tokens below the root


class Node(NamedTuple):
    """A node of a fitted tree. Sorted as tuples are, each comes behind its parent, and a forced one, which is as likely
    as what forces it, right behind that: of drafted nodes 1 and 2 and a node that 1 forces, the order is 1, forced, 2.
    So does a likely one.
    """

    after: int  # the drafted node that it is or comes behind, 0 for the root
    number: int  # of the nodes as they were found
    parent: int  # its parent's place in the tree
    path: TokenPath
    origin: int  # the drafted node that it is, 0 for another one
    certain: bool  # whether it is forced, and so is all ahead of it


@dataclass(frozen=True)
class FittedTree:
    """origins: of each node but the root the drafted one that it is, 0 for another one. certain: how many of the first
    nodes are certain to be accepted."""

    tree: DraftedTree
    origins: list[int]
    certain: int

    def begins(self, tree: DraftedTree) -> bool:
        """Whether a tree is this one or its first nodes, with places without a node behind them or not."""
        count = min(len(tree.tokens), len(self.tree.tokens))
        same = all(part[:count] == own[:count] for part, own in zip(tree, self.tree, strict=True))
        return same and all(parent < 0 for parent in tree.parents[max(count, 1) :])

    def scores(self, drafted: Sequence[int]) -> list[int]:
        """Scores of its nodes, and 0 for places without one, given those of the drafted ones, see `Report`: another one
        is as likely as its parent."""
        known = [SCORE_STEPS]
        for origin, parent in zip(self.origins, self.tree.parents[1:], strict=True):
            known.append(drafted[origin - 1] if origin else known[parent])
        return known[1:] + [0] * (len(drafted) - len(self.origins))


def fitted_tree(
    drafted: DraftedTree,
    mask_behind: Callable[[TokenPath], NodeMask],
    likely: Callable[[NodeMask, TokenPath], int | None],
    leaves: Collection[int],
    nodes: int,
    depth: int,
) -> tuple[FittedTree, dict[int, NodeMask]]:
    """Of a drafted tree what its masks allow, and where they leave no choice, what they force: at most so many nodes
    below the root, the likeliest ones, down to the depth -> that tree, and the masks of some of its nodes by their
    place. Asks for no mask that does not matter to it. mask_behind: of a path that is allowed; likely: of a mask and
    its path, a token that is drafted first if the mask allows it, if any; leaves: tokens that end the output."""
    children, found, masks = drafted.children(), list[Node](), dict[int, NodeMask]()
    waiting, numbers = [Node(0, 0, -1, (), 0, True)], count(1)
    while waiting and len(found) <= nodes:
        node = heappop(waiting)
        place, path = len(found), node.path
        found.append(node)
        if place == nodes or len(path) == depth or (path and path[-1] in leaves):
            continue
        mask = masks[place] = mask_behind(path)
        drafts = children[node.origin] if node.origin or not path else []
        below = {drafted.tokens[child]: child for child in drafts if mask.allows(drafted.tokens[child])}
        first = likely(mask, path) if mask.only is None else mask.only
        if first is not None and mask.allows(first):
            sure, origin = node.certain and mask.only is not None, below.pop(first, 0)
            heappush(waiting, Node(node.after, next(numbers), place, (*path, first), origin, sure))
        for token, child in below.items() if mask.only is None else ():
            heappush(waiting, Node(child, next(numbers), place, (*path, token), child, False))
    tree = DraftedTree([drafted.tokens[0], *(node.path[-1] for node in found[1:])], [node.parent for node in found])
    certain = sum(node.certain for node in found[1:])
    return FittedTree(tree, [node.origin for node in found[1:]], certain), masks


# The output so far, the tree that was drafted for the coming step, and the most nodes below the root and levels.
FitTree = Callable[[Sequence[int], DraftedTree, int, int], FittedTree]
