"""`specstep::choose`. See `reference.choose`."""

from typing import Any

import torch
from torch import Tensor

from ..native import has_library
from ..registration import traced_op
from . import reference


def _cpu(logits: Tensor, *arguments: Any) -> Any:
    if not has_library():
        return reference.choose(logits, *arguments)
    given = logits if logits.dtype in (torch.float32, torch.bfloat16) else logits.float()
    return torch.ops.specstep.choose_native(given, *arguments)


def _triton(*arguments: Any) -> Any:
    from . import triton

    return triton.choose(*arguments)


choose = traced_op("specstep::choose", reference.choose, cpu=_cpu, cuda=_triton)
