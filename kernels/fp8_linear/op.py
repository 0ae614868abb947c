"""`specstep::fp8_linear`. See `reference.fp8_linear`."""

from torch import Tensor

from ..registration import traced_op
from . import reference


def _check(x: Tensor, weight: Tensor, scale: Tensor, *_: Tensor | None) -> None:
    outputs, inputs = weight.shape
    if weight.dtype != reference.FLOAT8:
        raise ValueError(f"weight: expected {reference.FLOAT8}, got {weight.dtype}")
    if outputs % reference.MULTIPLE or inputs % reference.MULTIPLE:
        raise ValueError(f"weight: expected multiples of {reference.MULTIPLE}, got {[outputs, inputs]}")
    if x.shape[-1] != inputs or tuple(scale.shape) != (outputs, 1):
        raise ValueError(
            f"x, scale: expected [..., {inputs}] and [{outputs}, 1], got {list(x.shape)} and {list(scale.shape)}"
        )


fp8_linear = traced_op("specstep::fp8_linear", reference.fp8_linear, check=_check)
