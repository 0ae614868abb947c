# mypy: allow-untyped-defs
"""Flash-decoding for trees: heads of a group and tree nodes share one tile, the cache is split, a second kernel merges.

Kernel arguments come as input pointers, integers, output pointers, constants (a TensorRT plugin passes them so).
`scale` and `softcap` are constants: as run-time arguments they are fp32 in eager Triton and fp64 through Inductor.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from ..registration import greatest
from . import blocks

LEAST_KEYS = tl.constexpr(64)  # of a split: fewer cost more to merge than they save
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    q, key_row, value_row, slot, visible, peak, total, out,
    stride_ks, stride_kd, stride_vs, stride_vd, limit,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One block of keys in the running softmax of base 2: row maximum `peak`, sum `total`, weighted sum `out`."""
    inside = (slot < limit)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    key = tl.load(key_row + slot[:, None] * stride_ks + column * stride_kd, mask=inside & (column < D), other=0.0)
    scores = tl.dot(q, tl.trans(key), input_precision="ieee")
    if SOFTCAP > 0.0:
        # tanh(x) = 2 * sigmoid(2 * x) - 1
        scores = SOFTCAP * (2.0 * tl.sigmoid(scores * (2.0 * SCALE / SOFTCAP)) - 1.0)
        scores = scores * LOG2_E
    else:
        scores = scores * (SCALE * LOG2_E)
    scores = tl.where(visible, scores, float("-inf"))

    new_peak = tl.maximum(peak, tl.max(scores, 1))
    finite_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # nothing seen so far
    weights = tl.exp2(scores - finite_peak[:, None])
    rescale = tl.exp2(peak - finite_peak)
    column = tl.arange(0, BLOCK_DV)[None, :]
    value = tl.load(value_row + slot[:, None] * stride_vs + column * stride_vd, mask=inside & (column < DV), other=0.0)
    out = tl.dot(weights.to(value.dtype), value, out * rescale[:, None], input_precision="ieee")
    return new_peak, total * rescale + tl.sum(weights, 1), out


@triton.jit
def attend_split_kernel(
    q, k, v, lengths, depths, ancestors, key_depths,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    kv_heads, group, nodes, keys, words, slots,
    split_out, split_norm,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64) // kv_heads
    head = tl.program_id(2).to(tl.int64) % kv_heads
    length = tl.minimum(tl.maximum(tl.load(lengths + batch), 0), slots).to(tl.int32)
    k += batch * stride_kb + head * stride_kh
    v += batch * stride_vb + head * stride_vh

    # Row r of the tile: query head r // nodes of the group, tree node r % nodes.
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_used = row < group * nodes
    node = row % nodes
    column = tl.arange(0, BLOCK_D)
    q += batch * stride_qb + (head * group + row // nodes)[:, None] * stride_qh + node[:, None] * stride_qt
    queries = tl.load(q + column[None, :] * stride_qd, mask=row_used[:, None] & (column < D)[None, :], other=0.0)
    depth = tl.load(depths + batch * nodes + node, mask=row_used, other=0).to(tl.int32)

    # Blocks of work: those of the committed slots (from the first that a window leaves visible), then the tree's.
    # Splits share what this row really holds, so the cost follows its length and not the capacity. Those that are too
    # many for it, or for the programs that run, have nothing to do.
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length + tl.min(tl.where(row_used, depth, 2147483647), 0) - WINDOW + 1, 0) // BLOCK_S
    last = tl.cdiv(length, BLOCK_S)
    first = tl.minimum(first, last)
    # Tree keys up to the last that any query sees, in whole words: a prompt's tokens see none of the later ones.
    seen = 0
    bits = ancestors + (batch * nodes + node) * words
    for number in range(tl.cdiv(keys, 32)):
        word = tl.load(bits + number, mask=row_used, other=0)
        seen = tl.where(tl.max((word != 0).to(tl.int32), 0) > 0, 32 * number + 32, seen)
    tree_blocks = tl.cdiv(tl.minimum(seen, keys), BLOCK_S)
    splits = tl.minimum(tl.num_programs(0), PROGRAMS // (tl.num_programs(1) * tl.num_programs(2)))
    per_split = tl.cdiv(last - first + tree_blocks, tl.maximum(splits, 1))
    per_split = tl.maximum(per_split, (LEAST_KEYS + BLOCK_S - 1) // BLOCK_S)
    begin = first + tl.program_id(0) * per_split
    end = begin + per_split

    # [split, B, H, T]: heads of a group follow one another, so row r is entry r of this group's heads.
    entry = tl.program_id(0).to(tl.int64) * tl.num_programs(2) + tl.program_id(2)
    entry = entry * (group * nodes) + row
    if begin >= last + tree_blocks:
        tl.store(split_norm + entry, tl.full([BLOCK_R], float("-inf"), tl.float32), mask=row_used)
        return

    peak = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    out = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    for block in range(begin, tl.minimum(end, last)):
        slot = block * BLOCK_S + tl.arange(0, BLOCK_S)
        visible = row_used[:, None] & (slot < length)[None, :]
        if WINDOW > 0:
            visible &= (length + depth)[:, None] - slot[None, :] < WINDOW
        peak, total, out = _attend(
            queries, k, v, slot, visible, peak, total, out,
            stride_ks, stride_kd, stride_vs, stride_vd, length,
            SCALE, SOFTCAP, D, DV, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    for block in range(tl.maximum(begin, last) - last, tl.minimum(end - last, tree_blocks)):
        key = block * BLOCK_S + tl.arange(0, BLOCK_S)
        word = tl.load(bits[:, None] + (key // 32)[None, :], mask=row_used[:, None] & (key < keys)[None, :], other=0)
        visible = (((word >> (key % 32)[None, :]) & 1) != 0) & (length + key < slots)[None, :]
        if WINDOW > 0:
            key_depth = tl.load(key_depths + batch * keys + key, mask=key < keys, other=0).to(tl.int32)
            visible &= depth[:, None] - key_depth[None, :] < WINDOW
        peak, total, out = _attend(
            queries, k, v, length + key, visible, peak, total, out,
            stride_ks, stride_kd, stride_vs, stride_vd, tl.minimum(length + keys, slots),
            SCALE, SOFTCAP, D, DV, BLOCK_D, BLOCK_DV,
        )  # fmt: skip

    safe_total = tl.where(total > 0.0, total, 1.0)
    tl.store(split_norm + entry, tl.where(total > 0.0, peak + tl.log2(safe_total), float("-inf")), mask=row_used)
    column = tl.arange(0, BLOCK_DV)[None, :]
    mask = row_used[:, None] & (column < DV)
    tl.store(split_out + entry[:, None] * DV + column, out / safe_total[:, None], mask=mask)


@triton.jit
def merge_splits_kernel(
    split_out, split_norm, sinks, heads, nodes, splits, out,
    HAS_SINKS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program per (b, h, t): splits weighted by their share of the softmax denominator."""
    entry = tl.program_id(0).to(tl.int64)
    node = entry % nodes
    head = entry // nodes % heads
    batch = entry // nodes // heads
    split = tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_DV)
    at = split * tl.num_programs(0).to(tl.int64) + entry
    norm = tl.load(split_norm + at, mask=split < splits, other=float("-inf"))
    peak = tl.max(norm, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        peak = tl.maximum(peak, sink)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    share = tl.exp2(norm - peak)
    total = tl.sum(share, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - peak)
    mask = (norm > float("-inf"))[:, None] & (column < DV)[None, :]
    values = tl.load(split_out + at[:, None] * DV + column[None, :], mask=mask, other=0.0)
    merged = tl.sum(values * share[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    to = out + ((batch * nodes + node) * heads + head) * DV
    tl.store(to + column, merged.to(out.dtype.element_ty), mask=column < DV)


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    depths: Tensor,
    ancestors: Tensor,
    key_depths: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Launch for `reference.tree_attention`."""
    batch, heads, nodes, key_size = q.shape
    _, kv_heads, slots, value_size = v.shape
    group = heads // kv_heads
    # What a kernel is compiled with must not depend on sizes that vary from step to step, nor may the memory it takes.
    most_rows = group * min(greatest(nodes), blocks.LONG)
    options = blocks.split_blocks(most_rows, key_size, value_size, q.element_size(), softcap)
    splits = blocks.most_splits(kv_heads * triton.cdiv(most_rows, options["BLOCK_R"]))
    split_out = torch.empty(splits, batch, heads, nodes, value_size, dtype=torch.float32, device=q.device)
    split_norm = torch.empty(splits, batch, heads, nodes, dtype=torch.float32, device=q.device)
    out = torch.empty(batch, nodes, heads, value_size, dtype=q.dtype, device=q.device)
    tiles = triton.cdiv(group * nodes, options["BLOCK_R"])
    wrap_triton(attend_split_kernel)[(splits, tiles, batch * kv_heads)](
        q,
        k,
        v,
        lengths.contiguous(),
        depths.contiguous(),
        ancestors.contiguous(),
        key_depths.contiguous(),
        *q.stride(),
        *k.stride(),
        *v.stride(),
        kv_heads,
        group,
        nodes,
        key_depths.shape[1],
        ancestors.shape[2],
        slots,
        split_out,
        split_norm,
        SCALE=scale,
        SOFTCAP=softcap,
        WINDOW=window,
        D=key_size,
        DV=value_size,
        PROGRAMS=blocks.PROGRAMS,
        **options,
    )
    wrap_triton(merge_splits_kernel)[(batch * heads * nodes,)](
        split_out,
        split_norm,
        split_norm if sinks is None else sinks,
        heads,
        nodes,
        splits,
        out,
        HAS_SINKS=sinks is not None,
        DV=value_size,
        **blocks.merge_blocks(splits, value_size),
    )
    return out
