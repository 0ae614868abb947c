"""What the tree layout is, in plain torch: the specification, and what a CPU graph runs.

No loop over nodes, no integer bit operation and no constant tensor, so it also exports to ONNX and TensorRT.
"""

import torch
from torch import Tensor

from ..bits import pack_bits


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
    batch, count = parents.shape
    node = torch.arange(count, device=parents.device)
    linked = valid & (parents >= 0) & (parents < node)
    jump = torch.where(linked, parents, node)  # a node without a parent is its own: jumping further stays there

    itself = (node == node[:, None]).expand(batch, count, count)
    ancestor = itself
    for _ in range((count - 1).bit_length()):  # pointer jumping: knows 2**k ancestors after k rounds
        ancestor = ancestor | ancestor.gather(1, jump[:, :, None].expand(batch, count, count))
        jump = jump.gather(1, jump)

    in_tree = jump == 0  # the chain of parents ends at the root
    ancestor = ancestor & in_tree[:, :, None] | itself  # ONNX Runtime has no Where of bools
    return pack_bits(ancestor), ancestor.long().sum(-1) - 1
