"""`specstep::tree_attention`. See `reference.tree_attention`."""

from typing import Any

import torch
from torch import Tensor

from ..bits import word_count
from ..int8_rows import row_size
from ..native import has_library
from ..registration import traced_op
from . import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _check(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, depths: Tensor, ancestors: Tensor, key_depths: Tensor,
    scale: float, *_: Any,
) -> None:  # fmt: skip
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"q: expected a multiple of the {k.shape[1]} key heads, got {q.shape[1]} heads")
    head = row_size(k.shape[3]) if k.dtype == torch.int8 else k.shape[3]
    if q.shape[3] != head:
        raise ValueError(f"q: expected heads of size {head}, as the keys have, got {q.shape[3]}")
    words, keys = word_count(key_depths.shape[1]), key_depths.shape[1]
    if ancestors.shape[2] < words:
        raise ValueError(f"ancestors: expected >= {words} words for {keys} tree keys, got {ancestors.shape[2]}")
    if k.dtype not in (q.dtype, torch.int8) or v.dtype != k.dtype:
        raise ValueError(f"q, k, v: expected one dtype, or int8 for k and v, got {q.dtype}, {k.dtype}, {v.dtype}")
    if scale < 0:
        raise ValueError(f"scale: expected >= 0, got {scale}")


def _cpu(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, depths: Tensor, ancestors: Tensor, key_depths: Tensor,
    scale: float, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None,
) -> Any:  # fmt: skip
    where = (lengths, depths, ancestors, key_depths)
    if not has_library() or q.dtype not in DTYPES:
        return reference.tree_attention(q, k, v, *where, scale, window, softcap, sinks)
    sinks = None if sinks is None else sinks.float().contiguous()
    return torch.ops.specstep.tree_attention_native(q, k, v, *where, scale, window, softcap, sinks)


def _triton(*arguments: Any) -> Any:
    from . import triton

    return triton.tree_attention(*arguments)


tree_attention = traced_op("specstep::tree_attention", reference.tree_attention, cpu=_cpu, cuda=_triton, check=_check)
