"""Acceptance without a loop, in plain torch: the specification, and what a CPU graph runs."""

import torch
from torch import Tensor

from ..bits import unpack_bits


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
    count = tokens.shape[1]
    node = torch.arange(count, device=tokens.device)
    ancestor = unpack_bits(ancestors, count)  # [B, T, T]

    wanted = choice.gather(1, parents.clamp(0, count - 1))
    agrees = valid & (parents >= 0) & (parents < node) & (tokens == wanted)
    agrees = agrees | (node == 0)
    # Bit 0, the root, tells the nodes that are in the tree from those that only have themselves.
    accepted = ancestor[:, :, 0] & (agrees[:, None, :] | ~ancestor).all(-1) & (depths <= max_depth)

    # One key per node, so that no backend has a tie to break: deepest first, then the lowest index.
    key = torch.where(accepted, depths * count + (count - 1 - node), -1)
    best = key.argmax(-1, keepdim=True)  # [B, 1]
    length = depths.gather(1, best)

    on_path = ancestor.gather(1, best[:, :, None].expand(-1, 1, count))  # [B, 1, T]
    level = torch.arange(max_depth + 1, device=tokens.device)
    at_level = on_path & (depths[:, None, :] == level[:, None])  # [B, P, T], at most one True per row
    path = torch.where(at_level, node, 0).sum(-1)
    path = torch.where(level <= length, path, level.clamp(max=count - 1))
    return path, length.squeeze(1)
