"""What `specstep::expert_linear` means."""

from torch import Tensor


def expert_linear(x: Tensor, weight: Tensor, experts: Tensor, transposed: bool) -> Tensor:
    """See `op.expert_linear`; accumulated in fp32 and rounded once."""
    if transposed:
        weight = weight.transpose(1, 2)
    return (x.float()[:, None] * weight[experts].float()).sum(2).to(x.dtype)
