"""`specstep::expert_linear`."""

import torch
from torch import Tensor

from ..linear import small_expert_linear
from ..registration import traced_op
from . import reference

ALIGNED = 8  # elements: rows of 16 bytes, as torch's grouped product wants them


@traced_op("specstep::expert_linear")
def expert_linear(x: Tensor, weight: Tensor, experts: Tensor, transposed: bool) -> Tensor:
    """Row p of x times the weight of its own expert.

    Args:
        x: [P, K], a row for each pair of a token and one of its experts.
        weight: [E, N, K] of the same dtype, [E, K, N] where transposed.
        experts: int64 [P], each below E.

    Returns:
        [P, N]: `weight[experts[p]] @ x[p]`.

    On a GPU, other dtypes than bfloat16 take a plain sum: Inductor fuses it, eager torch holds [P, N, K] in memory.
    """
    if not x.is_cuda:
        return small_expert_linear(x, weight.transpose(1, 2) if transposed else weight, experts)
    if x.dtype == torch.bfloat16 and all(size % ALIGNED == 0 for size in weight.shape[1:]):
        return grouped(x, weight, experts, transposed)
    return reference.expert_linear(x, weight, experts, transposed)


def grouped(x: Tensor, weight: Tensor, experts: Tensor, transposed: bool) -> Tensor:
    """The same over torch's grouped product, bfloat16 only: rows sorted by expert, and back."""
    chosen, order = experts.sort(stable=True)
    numbers = torch.arange(weight.shape[0], device=x.device)
    ends = torch.searchsorted(chosen, numbers, right=True).to(torch.int32)
    out = torch.nn.functional.grouped_mm(x[order], weight if transposed else weight.transpose(1, 2), offs=ends)
    return torch.empty_like(out).index_copy(0, order, out)
