"""What `specstep::small_linear` means."""

import torch
from torch import Tensor


def small_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x [..., K] @ weight [N, K].T + bias [N]`, accumulated in fp32 and rounded once to the dtype of `x`."""
    wide_bias = None if bias is None else bias.float()
    return torch.nn.functional.linear(x.float(), weight.float(), wide_bias).to(x.dtype)
