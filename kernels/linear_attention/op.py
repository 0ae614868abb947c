"""`specstep::linear_attention`. See `reference.linear_attention`."""

from typing import Any

import torch
from torch import Tensor

from ..native import has_library
from ..registration import traced_op
from . import reference


def _check(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rates: Tensor | None, beta: Tensor | None,
    state: Tensor, parents: Tensor | None,
) -> None:  # fmt: skip
    heads, size = value.shape[2], key.shape[3]
    counts = (1, size) if rates is None else (value.shape[3],)
    if query.shape[2:] != key.shape[2:] or heads % key.shape[2] != 0:
        raise ValueError(
            f"key: expected heads of which the {heads} value heads are a multiple, and queries like keys, got "
            f"{tuple(key.shape[2:])} and queries {tuple(query.shape[2:])}"
        )
    if decay.shape[2] != heads or decay.shape[3] not in counts:
        expected = " or ".join(map(str, counts))
        raise ValueError(f"decay: expected {heads} heads of {expected} factors, got {tuple(decay.shape[2:])}")
    if rates is not None and rates.shape != state.shape[1:]:
        raise ValueError(f"rates: expected {tuple(state.shape[1:])} as in a state, got {tuple(rates.shape)}")
    if tuple(state.shape[1:]) != (heads, size, value.shape[3]):
        raise ValueError(f"state: expected {(heads, size, value.shape[3])} for a row, got {tuple(state.shape[1:])}")
    if any(x is not None and x.dtype != torch.float32 for x in (query, key, value, decay, rates, beta, state)):
        raise ValueError("query, key, value, decay, rates, beta, state: expected float32")


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return value.new_empty(value.shape), value.new_empty(value.shape)


def _cpu(*arguments: Any) -> Any:
    if not has_library():
        return reference.linear_attention(*arguments)
    return torch.ops.specstep.linear_attention_native(*arguments)


def _triton(*arguments: Any) -> Any:
    from . import triton

    return triton.linear_attention(*arguments)


linear_attention = traced_op(
    "specstep::linear_attention", reference.linear_attention, cpu=_cpu, cuda=_triton, check=_check, fake=_fake
)
