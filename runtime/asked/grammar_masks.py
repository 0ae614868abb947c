"""Keeps one output inside a grammar: what may follow each node of a step's tree, by llguidance.

The text is that of plain decoding under the same grammar, whatever is drafted: a node's mask depends on the tokens
ahead of it alone.
"""

from collections.abc import Collection, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...report import DraftedTree
from .fitted_tree import FittedTree, TokenPath, fitted_tree
from .habits import BEHIND, Habits
from .node_mask import NodeMask

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_MADE = 32  # masks of an output that are kept: a document visits some 20


class GrammarMasks:
    """Says before each step what may follow the nodes of its tree."""

    def __init__(
        self,
        matcher: "LLMatcher",
        vocabulary: int,
        ends: Sequence[int],
        stops: Collection[int],
        least: int,
        ends_late: bool,
        habits: Habits,
    ):
        self._matcher, self._words = matcher, -(-vocabulary // 32)
        self._stops = self._bits(stops)
        self._others = ~(self._stops | self._bits(ends))
        self._end_bits = [(end // 32, 1 << end % 32) for end in ends]
        self._leaves = frozenset(ends) | frozenset(stops)
        self._least, self._late, self._read = least, ends_late, 0
        # Masks by llguidance's bits, and whether it is too early for an end.
        self._made = dict[tuple[bytes, bool], NodeMask]()
        self._fitted, self._known = (
            FittedTree(DraftedTree([], []), [], 0),
            dict[int, NodeMask](),
        )  # and masks of some of its nodes
        self._path: TokenPath = ()  # where the matcher is, below the root
        self._masked = 0  # tokens of that path behind which it gave its last mask
        self._habits = habits
        self._last = DraftedTree([], []), dict[int, NodeMask]()  # the last step's tree, and masks of its nodes

    def __call__(self, output: Sequence[int], tree: DraftedTree) -> NDArray[np.int32]:
        """The output so far and the tree -> bits int32 [nodes, ceil(vocabulary / 32)]. Raises InputError where the
        grammar fails, as one that takes too long to follow."""
        self._read_up_to(output)
        known = self._known if self._fitted.begins(tree) else {}
        paths: dict[int, TokenPath] = {0: ()}  # of nodes that the grammar allows
        masks = dict[int, NodeMask]()
        ended = set[int]()  # nodes that end the output, and those below them, which will not be
        bits = np.zeros((len(tree.tokens), self._words), np.uint32)
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            allowed = parent in paths and masks[parent].allows(token)
            if parent in ended or (allowed and token in self._leaves):
                bits[node] = self._stops  # each must allow something
                ended.add(node)
            elif allowed:
                paths[node] = (*paths[parent], token)
            if node in paths:
                masks[node] = known[node] if node in known else self._mask_behind(len(output), paths[node])
                bits[node] = masks[node].bits
        self._last = tree, masks
        return bits.view(np.int32)

    def fit(self, output: Sequence[int], tree: DraftedTree, nodes: int, depth: int) -> FittedTree:
        """The output so far and the tree that was drafted for it -> at most so many nodes below the root, down to the
        depth: those that the grammar allows, and where it leaves no choice, the tokens that it forces. A forced node
        comes right behind what forces it, being as likely. Raises InputError, see `__call__`."""
        self._read_up_to(output)
        before = output[-BEHIND:] or tree.tokens[:1]  # the root, the prompt's last token, ahead of an output

        def likely(mask: NodeMask, path: TokenPath) -> int | None:
            return self._habits.likely(mask, [*before, *path])

        self._fitted, self._known = fitted_tree(
            tree, partial(self._mask_behind, len(output)), likely, self._leaves, nodes, depth
        )
        return self._fitted

    def _mask_behind(self, written: int, path: TokenPath) -> NodeMask:
        """What may follow a path behind so many tokens. A stop token may where the grammar may end."""
        self._move_to(path)
        said, early = self._matcher.compute_bitmask(), self._late or written + len(path) < self._least
        self._masked = len(path)
        check_matcher(self._matcher)
        if (said, early) not in self._made:
            if len(self._made) == MOST_MADE:
                self._made.clear()
            self._made[said, early] = self._made_of(np.frombuffer(said, np.uint32)[: self._words], early)
        return self._made[said, early]

    def _made_of(self, mask: NDArray[np.uint32], early: bool) -> NodeMask:
        may_end = any(int(mask[word]) & bit for word, bit in self._end_bits)
        mask = mask & self._others
        goes_on = bool(np.count_nonzero(mask))
        if may_end and not (goes_on and early):
            mask |= self._stops
        elif not goes_on:
            raise InputError("structured: expected a grammar that some text keeps, got one that nothing may follow")
        return NodeMask(mask)

    def _move_to(self, path: TokenPath) -> None:
        """Move the matcher from where it is below the root to another path that the grammar allows. Behind a rollback
        llguidance (1.5.1 to 1.9.1) may give its last mask, of the path that was left: so it gives one where the two
        paths part. A copy for each path would take longer the longer the output is."""
        shared = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(self._path, path, strict=False)))
        if shared < len(self._path):
            self._matcher.rollback(len(self._path) - shared)
            if self._masked > shared:
                self._matcher.compute_bitmask()
                self._masked = shared
        _consume(self._matcher, path[shared:])
        self._path = path

    def _read_up_to(self, output: Sequence[int]) -> None:
        """Move to the end of an output, and learn from it. Raises InputError, see `__call__`."""
        new = output[self._read :]
        if new:  # its last token is the root from now on
            self._move_to(tuple(new))
            self._read, self._path, self._masked = len(output), (), 0
        (tree, masks), node = self._last, 0
        children, behind = tree.children(), [*(output[: -len(new)][-BEHIND:] or tree.tokens[:1])] if new else []
        for token in new if tree.tokens else ():
            self._habits.learn(masks[node], behind, token)
            behind.append(token)
            node = next((child for child in children[node] if tree.tokens[child] == token), 0)
            if not node:
                break
        self._last = DraftedTree([], []), masks

    def _bits(self, tokens: Collection[int]) -> NDArray[np.uint32]:
        bits = np.zeros(self._words, np.uint32)
        for token in tokens:
            bits[token // 32] |= np.uint32(1 << token % 32)
        return bits


def _consume(matcher: "LLMatcher", tokens: Sequence[int]) -> None:
    """Raises InputError, see `GrammarMasks.__call__`."""
    if tokens and not matcher.consume_tokens(list(tokens)):
        check_matcher(matcher)
        raise InputError("structured: the output left its grammar")


def check_matcher(matcher: "LLMatcher") -> None:
    """Raises InputError with what a matcher says."""
    if matcher.is_error():
        said = " ".join(matcher.get_error().split())
        raise InputError(f"structured: expected a grammar that can be kept, got: {said:.300}")
