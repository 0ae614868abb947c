"""`specstep::expert_linear`. See `reference.expert_linear`."""

import torch
from torch import Tensor

from ..registration import traced_op
from . import reference

ALIGNED = 8  # elements: rows of 16 bytes, as torch's grouped product wants them


def _cpu(x: Tensor, weight: Tensor, experts: Tensor, transposed: bool) -> Tensor:
    """A grouped product, of sizes that it takes. Engines have packed weights instead (`kernels.linear`)."""
    depth, columns = weight.shape[1:] if transposed else weight.shape[:0:-1]
    missing = [-size % ALIGNED for size in weight.shape[1:]]
    if any(missing):
        weight = torch.nn.functional.pad(weight, (0, missing[1], 0, missing[0]))
        x = torch.nn.functional.pad(x, (0, -depth % ALIGNED))
    return grouped(x, weight, experts, transposed)[:, :columns].contiguous()


def _cuda(x: Tensor, weight: Tensor, experts: Tensor, transposed: bool) -> Tensor:
    """A grouped product in bfloat16. Other dtypes take the reference's plain sum: Inductor fuses it, eager torch holds
    [P, N, K] in memory."""
    if x.dtype == torch.bfloat16 and all(size % ALIGNED == 0 for size in weight.shape[1:]):
        return grouped(x, weight, experts, transposed)
    return reference.expert_linear(x, weight, experts, transposed)


def grouped(x: Tensor, weight: Tensor, experts: Tensor, transposed: bool) -> Tensor:
    """The op over torch's grouped product, on a GPU bfloat16 only: rows sorted by expert, and back."""
    chosen, order = experts.sort(stable=True)
    numbers = torch.arange(weight.shape[0], device=x.device)
    ends = torch.searchsorted(chosen, numbers, right=True).to(torch.int32)
    out = torch.nn.functional.grouped_mm(x[order], weight if transposed else weight.transpose(1, 2), offs=ends)
    return torch.empty_like(out).index_copy(0, order, out)


expert_linear = traced_op("specstep::expert_linear", reference.expert_linear, cpu=_cpu, cuda=_cuda)
