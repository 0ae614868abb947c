# mypy: allow-untyped-defs
"""Acceptance on a GPU: one program per tree, the whole tree in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from .blocks import blocks


@triton.jit
def _agreeing_words(tokens, parents, valid, choice, node_count, BLOCK_W: tl.constexpr):
    """Bit j of word w: node 32 * w + j carries the token that the target chose at its parent, or is the root."""
    bit = tl.arange(0, 32)[None, :]
    node = tl.arange(0, BLOCK_W)[:, None] * 32 + bit  # [W, 32]
    inside = node < node_count
    parent = tl.load(parents + node, mask=inside, other=-1)
    is_valid = tl.load(valid + node, mask=inside, other=0)
    linked = (is_valid != 0) & (parent >= 0) & (parent < node)
    token = tl.load(tokens + node, mask=linked, other=0)
    wanted = tl.load(choice + parent, mask=linked, other=0)
    agrees = (linked & (token == wanted)) | (node == 0)
    return tl.sum(tl.where(agrees, 1 << bit, 0), 1)  # distinct bits: the sum is their union


@triton.jit
def accept_kernel(
    tokens, parents, valid, ancestors, depths, choice,
    node_count, words, path_length,
    path, accepted,
    BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offset = row * node_count
    agreeing = _agreeing_words(tokens + offset, parents + offset, valid + offset, choice + offset, node_count, BLOCK_W)

    node = tl.arange(0, BLOCK_T)
    word = tl.arange(0, BLOCK_W)[None, :]
    inside = node < node_count
    mask = inside[:, None] & (word < words)
    ancestor = tl.load(ancestors + (offset + node)[:, None] * words + word, mask=mask, other=0)  # [T, W]
    failing = tl.sum(((ancestor & ~agreeing[None, :]) != 0).to(tl.int32), 1)
    rooted = tl.sum(tl.where(word == 0, ancestor & 1, 0), 1)
    depth = tl.load(depths + offset + node, mask=inside, other=-1).to(tl.int32)
    fits = (depth >= 0) & (depth < path_length)

    # One key per node: deepest first, then the lowest index. The root is always accepted, so the maximum is >= 0.
    key = tl.where((rooted != 0) & (failing == 0) & fits, depth * node_count + (node_count - 1 - node), -1)
    best_key = tl.max(key, 0)
    best = node_count - 1 - best_key % node_count
    length = best_key // node_count
    tl.store(accepted + row, length.to(tl.int64))

    # Each entry of the path is written once: depths up to `length` by their node, those beyond by their own index.
    path += row * path_length
    on_path = tl.load(ancestors + (offset + best) * words + node // 32, mask=inside, other=0) >> (node % 32)
    tl.store(path + depth, node.to(tl.int64), mask=((on_path & 1) != 0) & fits & (depth <= length))
    level = tl.arange(0, BLOCK_P)
    beyond = (level > length) & (level < path_length)
    tl.store(path + level, tl.minimum(level, node_count - 1).to(tl.int64), mask=beyond)


def accept(
    tokens: Tensor, parents: Tensor, valid: Tensor, ancestors: Tensor, depths: Tensor, choice: Tensor, max_depth: int
) -> tuple[Tensor, Tensor]:
    """Launch for `reference.accept`."""
    batch, count = tokens.shape
    words = ancestors.shape[2]
    path = torch.empty(batch, max_depth + 1, dtype=torch.int64, device=tokens.device)
    accepted = torch.empty(batch, dtype=torch.int64, device=tokens.device)
    wrap_triton(accept_kernel)[(batch,)](
        tokens.contiguous(),
        parents.contiguous(),
        valid.contiguous(),
        ancestors.contiguous(),
        depths.contiguous(),
        choice.contiguous(),
        count,
        words,
        max_depth + 1,
        path,
        accepted,
        **blocks(words, max_depth + 1),
    )
    return path, accepted
