"""`specstep::tree_attention`, and the two halves of it that a CPU graph calls. See `reference.tree_attention`.

The compiler puts the halves in place of the op, so that one mask serves all layers (`compile/rewrites.py`).
"""

from typing import Any

from torch import Tensor

from ..registration import traced_op
from ..tree_layout.reference import word_count
from . import reference


def _check(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, depths: Tensor, ancestors: Tensor, key_depths: Tensor, *_: Any
) -> None:
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"q: expected a multiple of the {k.shape[1]} key heads, got {q.shape[1]} heads")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q: expected heads of size {k.shape[3]}, as the keys have, got {q.shape[3]}")
    words, keys = word_count(key_depths.shape[1]), key_depths.shape[1]
    if ancestors.shape[2] < words:
        raise ValueError(f"ancestors: expected >= {words} words for {keys} tree keys, got {ancestors.shape[2]}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v: expected one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")


def _triton(*arguments: Any) -> Any:
    from . import triton

    return triton.tree_attention(*arguments)


tree_attention = traced_op("specstep::tree_attention", reference.tree_attention, cuda=_triton, check=_check)
visible_slots = traced_op("specstep::visible_slots", reference.visible_slots)
masked_attention = traced_op("specstep::masked_attention", reference.masked_attention)
