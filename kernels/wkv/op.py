"""`specstep::wkv`. See `reference.wkv`."""

from typing import Any

import torch
from torch import Tensor

from ..native import has_library
from ..registration import traced_op
from . import reference


def _check(key: Tensor, value: Tensor, decay: Tensor, first: Tensor, state: Tensor, *_: Any) -> None:
    channels = key.shape[2]
    for name, tensor, shape in (("decay", decay, (channels,)), ("first", first, (channels,))):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: expected {shape} as keys have channels, got {tuple(tensor.shape)}")
    if tuple(state.shape[1:]) != (3, channels):
        raise ValueError(f"state: expected {(3, channels)} for a row, got {tuple(state.shape[1:])}")
    if any(x.dtype != torch.float32 for x in (key, value, decay, first, state)):
        raise ValueError("key, value, decay, first, state: expected float32")


def _fake(key: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, tokens, channels = key.shape
    return key.new_empty(key.shape), key.new_empty(batch, tokens, 3, channels)


def _cpu(*arguments: Any) -> Any:
    if not has_library():
        return reference.wkv(*arguments)
    return torch.ops.specstep.wkv_native(*arguments)


def _triton(*arguments: Any) -> Any:
    from . import triton

    return triton.wkv(*arguments)


wkv = traced_op("specstep::wkv", reference.wkv, cpu=_cpu, cuda=_triton, check=_check, fake=_fake)
