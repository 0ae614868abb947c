"""Tree attention in plain torch: the specification, and what a CPU runs that has no C++ compiler."""

from math import floor, log2

import torch
from torch import Tensor

from ..bits import unpack_bits
from ..int8_rows import widen_rows


def visible_slots(
    lengths: Tensor, depths: Tensor, ancestors: Tensor, key_depths: Tensor, slots: int, window: int = 0
) -> Tensor:
    """Which cache slots each node attends to: bool [B, T, S]."""
    length = lengths.clamp(0, slots)[:, None, None]
    slot = torch.arange(slots + 1, device=lengths.device)  # one more, for tree keys beyond the cache
    key = torch.arange(key_depths.shape[1], device=lengths.device)
    committed = (slot < length).expand(-1, depths.shape[1], -1)  # [B, T, S + 1]
    tree = unpack_bits(ancestors, key_depths.shape[1])  # [B, T, M]
    if window > 0:
        committed = committed & (length + depths[:, :, None] - slot < window)
        tree = tree & (depths[:, :, None] - key_depths[:, None, :] < window)
    return committed.scatter(2, (length + key).clamp(max=slots).expand_as(tree), tree)[:, :, :slots]


def split_scale(scale: float) -> tuple[float, float]:
    """The greatest power of 2 that is at most `scale`, 0 for 0, and what is left of it. Queries are multiplied by the
    former: that changes no bit of the scores, which else would be beyond float16 before they are scaled."""
    if scale == 0:
        return 0.0, 1.0
    power = 2.0 ** floor(log2(scale))
    return power, scale / power


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
    """Attention of T tree nodes over the committed tokens of a cache and over M tree nodes that follow them.

    Args:
        q: [B, H, T, D], fp32, fp16 or bf16.
        k, v: [B, H_kv, S, D] and [B, H_kv, S, DV], the dtype of q, finite everywhere; a prefix view of a larger buffer
            is fine. H is a multiple of H_kv and query head h reads head h // (H / H_kv). Or int8, with scales,
            see `int8_rows`.
        lengths: int64 [B]. Slots below lengths[b] are committed, slot j at position j; tree key j is at slot
            lengths[b] + j, at position lengths[b] + key_depths[b, j]. Keys beyond S are not seen.
        depths: int64 [B, T], depth of the query nodes: query i is at position lengths[b] + depths[b, i].
        ancestors: int32 [B, T, W], W >= ceil(M / 32). Bit j of row i (word j // 32): query i sees tree key j.
        key_depths: int64 [B, M]. M is T in a verify pass; a draft level has only its frontier as queries, M > T.
        scale: factor of the scores, not negative.
        window: 0, or the sliding window: seen only where query position - key position < window.
        softcap: 0, or c in c * tanh(score / c) (Gemma 2).
        sinks: None, or [H]: one more logit per head in the softmax denominator (GPT-OSS).

    A query that sees nothing gets 0. Products run in the dtype of q, in fp32 with keys and values of int8; the softmax
    in fp32, or in the dtype of q where that is wider.

    Returns:
        [B, T, H, DV] in the dtype of q.
    """
    visible = visible_slots(lengths, depths, ancestors, key_depths, k.shape[2], window)
    batch, heads, nodes, head_dim = q.shape
    kv_heads = k.shape[1]
    before, after = split_scale(scale)
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    if k.dtype == torch.int8:
        q, k, v = q.float(), widen_rows(k), widen_rows(v)
    rows = (q * before).reshape(batch, kv_heads, heads // kv_heads * nodes, head_dim)
    scores = torch.matmul(rows, k.transpose(2, 3)).to(wide) * after
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.unflatten(2, (-1, nodes))  # [B, H_kv, G, T, S]
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)

    peak = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)  # finite where nothing is visible
    if sinks is not None:
        sink = sinks.to(wide).reshape(1, kv_heads, -1, 1, 1)
        peak = torch.maximum(peak, sink)
    weights = torch.exp(scores - peak)
    total = weights.sum(-1, keepdim=True)
    total = total + torch.exp(sink - peak) if sinks is not None else total.clamp(min=1e-30)
    out = torch.matmul(weights.to(v.dtype).flatten(2, 3), v).to(wide)  # [B, H_kv, G * T, DV]
    out = (out / total.flatten(2, 3)).to(dtype)  # here, on DV values a row, instead of on S weights
    return out.unflatten(2, (-1, nodes)).permute(0, 3, 1, 2, 4).reshape(batch, nodes, heads, v.shape[3]).contiguous()
