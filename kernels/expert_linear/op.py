"""`specstep::expert_linear`. See `reference.expert_linear`."""

import torch
from torch import Tensor

from ..native import has_library
from ..registration import traced_op
from . import reference

ALIGNED = 8  # elements: rows of 16 bytes, as torch's grouped product wants them


def _cpu(x: Tensor, weight: Tensor, experts: Tensor, transposed: bool) -> Tensor:
    """Each expert's weight as it is. Engines have it packed instead (`kernels.linear`)."""
    if not has_library():
        return reference.expert_linear(x, weight, experts, transposed)
    return torch.ops.specstep.expert_linear_native(x, weight.transpose(1, 2) if transposed else weight, experts)


def _cuda(x: Tensor, weight: Tensor, experts: Tensor, transposed: bool) -> Tensor:
    """A grouped product in bfloat16. Other dtypes take the reference's plain sum: Inductor fuses it, eager torch holds
    [P, N, K] in memory."""
    if x.dtype == torch.bfloat16 and all(size % ALIGNED == 0 for size in weight.shape[1:]):
        return grouped(x, weight, experts, transposed)
    return reference.expert_linear(x, weight, experts, transposed)


def grouped(x: Tensor, weight: Tensor, experts: Tensor, transposed: bool) -> Tensor:
    """The op over torch's grouped product, bfloat16 only: rows sorted by expert, and back."""
    chosen, order = experts.sort(stable=True)
    numbers = torch.arange(weight.shape[0], device=x.device)
    ends = torch.searchsorted(chosen, numbers, right=True).to(torch.int32)
    out = torch.nn.functional.grouped_mm(x[order], weight if transposed else weight.transpose(1, 2), offs=ends)
    return torch.empty_like(out).index_copy(0, order, out)


expert_linear = traced_op("specstep::expert_linear", reference.expert_linear, cpu=_cpu, cuda=_cuda)
