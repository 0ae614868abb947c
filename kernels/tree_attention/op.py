"""`specstep::tree_attention`."""

from torch import Tensor

from ..registration import traced_op
from ..tree_layout.reference import word_count
from . import reference


@traced_op("specstep::tree_attention")
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
            is fine. H is a multiple of H_kv and query head h reads head h // (H / H_kv). D and DV up to 256.
        lengths: int64 [B]. Slots below lengths[b] are committed, slot j at position j; tree key j is at slot
            lengths[b] + j, at position lengths[b] + key_depths[b, j]. Keys beyond S are not seen.
        depths: int64 [B, T], depth of the query nodes: query i is at position lengths[b] + depths[b, i].
        ancestors: int32 [B, T, W], W >= ceil(M / 32). Bit j of row i (word j // 32): query i sees tree key j.
        key_depths: int64 [B, M]. M is T in a verify pass; a draft level has only its frontier as queries, M > T.
        scale: factor of the scores.
        window: 0, or the sliding window: seen only where query position - key position < window.
        softcap: 0, or c in c * tanh(score / c) (Gemma 2).
        sinks: None, or [H]: one more logit per head in the softmax denominator (GPT-OSS).

    A query that sees nothing gets 0.

    Returns:
        [B, T, H, DV] in the dtype of q.
    """
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"q: expected a multiple of the {k.shape[1]} key heads, got {q.shape[1]} heads")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q: expected heads of size {k.shape[3]}, as the keys have, got {q.shape[3]}")
    if ancestors.shape[2] < word_count(key_depths.shape[1]):
        expected = word_count(key_depths.shape[1])
        raise ValueError(
            f"ancestors: expected >= {expected} words for {key_depths.shape[1]} tree keys, got {ancestors.shape[2]}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v: expected one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.is_cuda:
        from . import triton

        return triton.tree_attention(q, k, v, lengths, depths, ancestors, key_depths, scale, window, softcap, sinks)
    return reference.tree_attention(q, k, v, lengths, depths, ancestors, key_depths, scale, window, softcap, sinks)


@traced_op("specstep::visible_slots")
def visible_slots(
    lengths: Tensor, depths: Tensor, ancestors: Tensor, key_depths: Tensor, slots: int, window: int = 0
) -> Tensor:
    """The first half of `tree_attention` on a CPU: which slots each node attends to, bool [B, T, S]. The compiler puts
    it and `masked_attention` in place of the op, so that one mask serves all layers (`compile/passes.py`)."""
    return reference.visible_slots(lengths, depths, ancestors, key_depths, slots, window)


@traced_op("specstep::masked_attention")
def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """The second half of `tree_attention` on a CPU: [B, T, H, DV] from the mask [B, T, S]."""
    return reference.masked_attention(q, k, v, visible, scale, softcap, sinks)
