"""What `specstep::expert_linear` means."""

from torch import Tensor


def expert_linear(x: Tensor, weight: Tensor, experts: Tensor, transposed: bool) -> Tensor:
    """Row p of x times the weight of its own expert, accumulated in fp32 and rounded once.

    Args:
        x: [P, K], a row for each pair of a token and one of its experts.
        weight: [E, N, K] of the same dtype, [E, K, N] where transposed.
        experts: int64 [P], each below E.

    Returns:
        [P, N]: `weight[experts[p]] @ x[p]`.
    """
    if transposed:
        weight = weight.transpose(1, 2)
    return (x.float()[:, None] * weight[experts].float()).sum(2).to(x.dtype)
