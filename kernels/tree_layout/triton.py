# mypy: allow-untyped-defs
"""Tree layout on a GPU: one lane per node walks to the root; nothing passes between lanes."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from ..bits import word_count
from .blocks import blocks


@triton.jit
def _linked_parent(parents, valid, node, mask):
    """The parents of `node`, -1 where `mask` is off or there is no usable parent."""
    parent = tl.load(parents + node, mask=mask, other=-1)
    is_valid = tl.load(valid + node, mask=mask, other=0)
    # Compare as int64: a garbage parent may not fit 32 bits.
    return tl.where((is_valid != 0) & (parent >= 0) & (parent < node), parent, -1).to(tl.int32)


@triton.jit
def tree_layout_kernel(
    parents, valid, node_count, words,
    ancestors, depths,
    BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    offset = tl.program_id(0).to(tl.int64) * node_count
    parents += offset
    valid += offset
    node = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = node < node_count
    parent = _linked_parent(parents, valid, node, inside)

    # Walk all lanes up together. Each step lowers the index, so this ends after at most T - 1 steps.
    word = tl.arange(0, BLOCK_W)[None, :]
    itself = tl.where(word == (node // 32)[:, None], (1 << (node % 32))[:, None], 0)
    bits, current = itself, node
    depth = tl.zeros([BLOCK_T], tl.int64)
    while tl.max(parent, 0) >= 0:
        walking = parent >= 0
        step = tl.where(word == (parent // 32)[:, None], (1 << (parent & 31))[:, None], 0)
        bits |= tl.where(walking[:, None], step, 0)
        depth += walking.to(tl.int64)
        current = tl.where(walking, parent, current)
        parent = _linked_parent(parents, valid, current, walking)
    in_tree = current == 0

    bits = tl.where(in_tree[:, None], bits, itself)
    tl.store(ancestors + (offset + node)[:, None] * words + word, bits, mask=inside[:, None] & (word < words))
    tl.store(depths + offset + node, tl.where(in_tree, depth, 0), mask=inside)


def tree_layout(parents: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Launch for `reference.tree_layout`."""
    batch, count = parents.shape
    words = word_count(count)
    ancestors = torch.empty(batch, count, words, dtype=torch.int32, device=parents.device)
    depths = torch.empty(batch, count, dtype=torch.int64, device=parents.device)
    launch = blocks(words)
    wrap_triton(tree_layout_kernel)[(batch, triton.cdiv(count, launch["BLOCK_T"]))](
        parents.contiguous(),
        valid.contiguous(),
        count,
        words,
        ancestors,
        depths,
        **launch,
    )
    return ancestors, depths
