"""Forced acceptance, for measurement alone: as many drafts are accepted as were asked for, whatever the target says.

The speed at a given acceptance length can so be measured with any weights, random ones too. The text means nothing.
Letters: B batch, T nodes of the tree.
"""

import torch
from torch import Tensor

from ..kernels.bits import unpack_bits
from .choice import Choice, sampled_choice
from .state import State
from .tree import DraftTree


def forced_choice(count: int) -> Choice:
    """A choice under which the first path of `count` drafted nodes is accepted, or the deepest where none is as deep,
    and nothing below it. The target's own choice is computed all the same: it costs what it costs."""

    def choice(logits: Tensor, tree: DraftTree, ancestors: Tensor, depths: Tensor, depth: int, state: State) -> Tensor:
        own = sampled_choice(logits, tree, ancestors, depths, depth, state)
        size = own.shape[1]
        node = torch.arange(size, device=own.device)
        reached = depths.where(tree.valid & (depths <= count), -1)  # [B, T]
        end = (reached * size + (size - 1 - node)).argmax(1, keepdim=True)  # deepest, then first
        on_path = unpack_bits(ancestors, size).gather(1, end[:, :, None].expand(-1, -1, size))  # [B, 1, T]
        child = (tree.parents[:, None] == node[:, None]) & on_path & (node > 0)  # [B, T, T]: of a node, on the path
        forced = torch.where(child.any(2), (child * tree.tokens[:, None]).sum(2), own)
        return forced.scatter(1, end, _undrafted(own.gather(1, end), tree, end, logits.shape[2]))

    return choice


def _undrafted(token: Tensor, tree: DraftTree, node: Tensor, vocabulary: int) -> Tensor:
    """The first token [B, 1] from `token` [B, 1] on that no child of the node [B, 1] carries."""
    others = (token + torch.arange(tree.tokens.shape[1], device=token.device)) % vocabulary  # one more than children
    children = (tree.tokens.where((tree.parents == node) & tree.valid, -1))[:, None]
    taken = (others[:, :, None] == children).any(2)
    return others.gather(1, taken.long().argmin(1, keepdim=True))
