"""`specstep::tree_layout`."""

from torch import Tensor

from ..registration import traced_op
from . import reference


@traced_op("specstep::tree_layout")
def tree_layout(parents: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Everything verification needs to know of a batch of trees (the "build" kernel of EAGLE-2/3 engines).

    Args:
        parents: int64 [B, T]. Node 0 is the root; any other node's parent has a smaller index than the node.
        valid: bool [B, T]. The root is always in the tree, whatever `valid[:, 0]` says.

    A node is in the tree when it is valid, its parent index is in range and smaller than its own, and its parent is
    in the tree. Any other node has only itself as ancestor, and depth 0.

    Returns:
        ancestors: int32 [B, T, ceil(T / 32)]. Bit j % 32 of word j // 32 of row i: j is i or an ancestor of i.
        depths: int64 [B, T], 0 at the root.
    """
    if parents.is_cuda:
        from . import triton

        return triton.tree_layout(parents, valid)
    return reference.tree_layout(parents, valid)
