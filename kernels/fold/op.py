"""`specstep::fold`, and `specstep::folded` for ONNX. See `reference.fold`."""

from typing import Any

import torch
from torch import Tensor

from ..native import has_library
from ..registration import traced_op
from . import reference


def _cpu(*arguments: Any) -> None:
    if has_library():
        torch.ops.specstep.fold_native(*arguments)
    else:
        reference.fold(*arguments)


def _triton(*arguments: Any) -> None:
    from . import triton

    triton.fold(*arguments)


def _fake(state: Tensor, *_: Any) -> Tensor:
    return state.new_empty(state.shape)


fold = traced_op(
    "specstep::fold", reference.fold, cpu=_cpu, cuda=_triton, fake=lambda *_: None, mutates_args=("state",)
)
folded = traced_op("specstep::folded", reference.folded, fake=_fake)
