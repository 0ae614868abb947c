"""Tree attention in plain torch: the specification, and what a CPU graph runs.

A CPU graph that calls `visible_slots` once per step (and window) and `masked_attention` in each layer is what the op
computes, without the mask being rebuilt in every layer: Inductor does not merge equal subgraphs of two layers.
"""

import torch
from torch import Tensor

from ..tree_layout.reference import unpack_bits


def visible_slots(
    lengths: Tensor, depths: Tensor, ancestors: Tensor, key_depths: Tensor, slots: int, window: int = 0
) -> Tensor:
    """Which cache slots each node attends to: bool [B, T, S]."""
    keys = key_depths.shape[1]  # M
    index = torch.arange(slots, device=lengths.device) - lengths[:, None]  # [B, S] tree key, negative when committed
    key = index.clamp(0, keys - 1)
    bits = unpack_bits(ancestors, keys)  # [B, T, M]
    tree = bits.gather(2, key[:, None, :].expand(-1, bits.shape[1], -1)) & (index < keys)[:, None, :]
    visible = tree | (index < 0)[:, None, :]
    if window > 0:
        key_depth = torch.where(index < 0, index, key_depths.gather(1, key))  # position relative to lengths
        visible = visible & (depths[:, :, None] - key_depth[:, None, :] < window)
    return visible


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """Softmax attention of q [B, H, T, D] over k, v [B, H_kv, S, D] where visible [B, T, S] -> [B, T, H, D].

    The query heads of a group are rows of one matrix product: 21 ms against 29 ms for scaled_dot_product_attention
    with enable_gqa, SmolLM2-135M with 1984 slots on 2 cores. Products run in the cache's dtype, the softmax in fp32.
    """
    batch, heads, nodes, head_dim = q.shape
    kv_heads = k.shape[1]
    rows = q.reshape(batch, kv_heads, heads // kv_heads * nodes, head_dim)
    scores = torch.matmul(rows, k.transpose(2, 3)).float() * scale
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.unflatten(2, (-1, nodes))  # [B, H_kv, G, T, S]
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)

    peak = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)  # finite where nothing is visible
    if sinks is not None:
        sink = sinks.float().reshape(1, kv_heads, -1, 1, 1)
        peak = torch.maximum(peak, sink)
    weights = torch.exp(scores - peak)
    total = weights.sum(-1, keepdim=True)
    total = total + torch.exp(sink - peak) if sinks is not None else total.clamp(min=1e-30)
    weights = (weights / total).to(v.dtype).flatten(2, 3)
    out = torch.matmul(weights, v)  # [B, H_kv, G * T, D]
    return out.reshape(batch, heads, nodes, head_dim).transpose(1, 2).contiguous()


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
    """Attention of tree nodes over cache and tree. See `op.tree_attention`."""
    visible = visible_slots(lengths, depths, ancestors, key_depths, k.shape[2], window)
    return masked_attention(q, k, v, visible, scale, softcap, sinks)
