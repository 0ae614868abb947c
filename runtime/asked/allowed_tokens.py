"""The hook for masks: what a caller says may follow each node of a step's tree, checked."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...report import DraftedTree

# The output so far and the tree of the coming step, whose root is the last token -> bits as `session.Session.allow`
# takes them: int32 [nodes, ceil(vocabulary / 32)].
AllowedTokens = Callable[[Sequence[int], DraftedTree], NDArray[np.int32]]


def checking(hook: AllowedTokens, vocabulary: int) -> AllowedTokens:
    """A caller's hook, whose bits are checked: it raises what `checked` does."""
    return lambda output, tree: checked(hook(output, tree), tree, vocabulary)


def checked(bits: Any, tree: DraftedTree, vocabulary: int) -> NDArray[np.int32]:
    """The bits, if the step can choose by them. Raises InputError for another type or shape, and where a node that the
    bits themselves allow has nothing that may follow it."""
    shape = (len(tree.tokens), -(-vocabulary // 32))
    if not isinstance(bits, np.ndarray) or bits.dtype != np.int32 or bits.shape != shape:
        got = f"{bits.dtype} {bits.shape}" if isinstance(bits, np.ndarray) else type(bits).__name__
        raise InputError(f"allowed_tokens: expected an array of int32 {shape}, got {got}")
    words = bits.view(np.uint32).copy()
    words[:, -1] &= np.uint32(2**32 - 1 >> (-vocabulary % 32))  # bits past the vocabulary allow nothing
    allows: list[bool] = (words != 0).max(axis=1).tolist()
    reached = [True] * len(tree.tokens)
    for node, (token, parent) in enumerate(zip(*tree, strict=True)):
        if node:
            reached[node] = parent >= 0 and reached[parent] and bool(words[parent, token // 32] >> (token % 32) & 1)
        if reached[node] and not allows[node]:
            raise InputError(f"allowed_tokens: expected at least one token that may follow node {node}, got none")
    return bits
