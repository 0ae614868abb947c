"""`specstep::top_log_probs`. See `reference.top_log_probs`."""

from typing import Any

import torch
from torch import Tensor

from ..native import has_library
from ..registration import traced_op
from . import reference


def _cpu(logits: Tensor, *arguments: Any) -> Any:
    if not has_library():
        return reference.top_log_probs(logits, *arguments)
    given = logits if logits.dtype in (torch.float32, torch.bfloat16) else logits.float()
    mask = arguments[7:] or (None, None)  # the C++ op has no defaults
    return torch.ops.specstep.top_log_probs_native(given, *arguments[:7], *mask)


def _triton(*arguments: Any) -> Any:
    from . import triton

    return triton.top_log_probs(*arguments)


top_log_probs = traced_op("specstep::top_log_probs", reference.top_log_probs, cpu=_cpu, cuda=_triton)
