"""A linear layer over float8 weights in plain torch: the specification, and what a GPU's graph is made of.

Each output of the weight and each token of x has a scale of its own, so a token's result does not depend on what is
computed beside it. Source: the format e4m3 of OCP's 8-bit floating point specification (2023).
"""

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
GREATEST = 448.0  # of the format
LEAST_SCALE = 1e-12  # of a row of zeros
MULTIPLE = 16  # of inputs and of outputs, which the product wants


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] -> float8 [..., K], and float32 [..., 1] to multiply it with."""
    scale = (x.float().abs().amax(-1, keepdim=True) / GREATEST).clamp(min=LEAST_SCALE)
    return (x.float() / scale).clamp(-GREATEST, GREATEST).to(FLOAT8), scale


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer, its x rounded to float8, too.

    Args:
        x: bfloat16 [..., K]. weight: float8 [N, K], scale: float32 [N, 1], of `quantize`; K and N are multiples of 16.
        bias: bfloat16 [N].

    Returns:
        bfloat16 [..., N].
    """
    rows, scales = quantize(x.reshape(-1, x.shape[-1]))
    out = torch._scaled_mm(rows, weight.t(), scale_a=scales, scale_b=scale.t(), out_dtype=torch.bfloat16)
    out = out.reshape(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias
