"""`specstep::accept`."""

from torch import Tensor

from ..registration import traced_op
from . import reference


@traced_op("specstep::accept")
def accept(
    tokens: Tensor, parents: Tensor, valid: Tensor, ancestors: Tensor, depths: Tensor, choice: Tensor, max_depth: int
) -> tuple[Tensor, Tensor]:
    """The accepted path of each tree: every token on it is what the target chose at its parent.

    The deepest such path wins, and among equally deep ones the one whose last node has the lowest index. Greedy and
    sampled verification differ only in `choice`.

    Args:
        tokens, parents: int64 [B, T]. valid: bool [B, T]. depths: int64 [B, T] from `tree_layout`.
        ancestors: int32 [B, T, ceil(T / 32)], the packed bits of `tree_layout`: the same tensor that the attention
            reads, 1/8 of the bytes of a bool mask, and one AND per word tells whether all ancestors agree.
        choice: int64 [B, T], the target's token after each node.
        max_depth: the deepest node that may be accepted, >= 0.

    Returns:
        path: int64 [B, max_depth + 1], the node at each depth of the accepted path, 0 (the root) first. Entries
            beyond the accepted depth are their own index (at most T - 1): compaction there is the identity.
        accepted: int64 [B], accepted draft nodes, the root not counted.
    """
    if tokens.is_cuda:
        from . import triton

        return triton.accept(tokens, parents, valid, ancestors, depths, choice, max_depth)
    return reference.accept(tokens, parents, valid, ancestors, depths, choice, max_depth)
