"""Acceptance without a loop, in plain torch: the specification, and what a CPU graph runs."""

import torch
from torch import Tensor

from ..tree_layout.reference import unpack_bits


def accept(
    tokens: Tensor, parents: Tensor, valid: Tensor, ancestors: Tensor, depths: Tensor, choice: Tensor, max_depth: int
) -> tuple[Tensor, Tensor]:
    """The deepest path whose every token is the target's choice at its parent. See `op.accept`."""
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
