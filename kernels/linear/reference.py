"""What `specstep::packed_linear`, `packed_expert_linear` and `packed_embedding` mean."""

import torch
from torch import Tensor

from ..expert_linear import reference as plain
from .packing import unpack


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    """`x [..., K] @ W.T + bias`, accumulated in fp32 and rounded once to the dtype of `x`, where `weight` is packed
    from W [columns, K] and bias is [columns] or None."""
    wide_bias = None if bias is None else bias.float()
    wide = unpack(weight, columns, x.shape[-1]).float()
    return torch.nn.functional.linear(x.float(), wide, wide_bias).to(x.dtype)


def packed_expert_linear(x: Tensor, weight: Tensor, experts: Tensor, columns: int) -> Tensor:
    """Row p of `x [P, K]` times the weight of its expert, `weight` being packed from [E, columns, K]."""
    return plain.expert_linear(x, unpack(weight, columns, x.shape[1]), experts, False)


def packed_embedding(weight: Tensor, ids: Tensor, columns: int, depth: int) -> Tensor:
    """`W[ids]`, where `weight` is packed from W [columns, depth]."""
    return unpack(weight, columns, depth)[ids]
