"""`specstep::compact`, and `specstep::compacted` for ONNX. See `reference.compact`."""

from typing import Any

import torch
from torch import Tensor

from ..native import has_library
from ..registration import traced_op
from . import reference


def _check(caches: list[Tensor], *_: Any) -> None:
    if any(cache.dim() != 4 for cache in caches):
        raise ValueError(f"caches: expected [B, H, S, D] tensors, got shapes {[tuple(c.shape) for c in caches]}")


def _cpu(caches: list[Tensor], lengths: Tensor, path: Tensor, accepted: Tensor) -> None:
    if has_library():
        torch.ops.specstep.compact_native(caches, lengths, path, accepted)
    else:
        reference.compact(caches, lengths, path, accepted)


def _triton(*arguments: Any) -> None:
    from . import triton

    triton.compact(*arguments)


compact = traced_op(
    "specstep::compact", reference.compact, cpu=_cpu, cuda=_triton, check=_check, mutates_args=("caches",)
)
compacted = traced_op("specstep::compacted", reference.compacted)
