"""What `specstep::packed_linear`, `packed_expert_linear` and `packed_embedding` mean."""

import torch
from torch import Tensor

from .groups import GROUP, GROUP_KINDS, Groups, unpack_groups
from .packing import unpack

CHUNK_BYTES = 8 * 1024  # of a panel, whose sum is made before it is added to the sum of others


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    """`x [..., K] @ W.T + bias`, accumulated in fp32 and rounded once to the dtype of `x`, where `weight` is packed
    from W [columns, K] and bias is [columns] or None.

    Where W is in groups, x is quantised: each group of 32 along K to -127 to 127 times a scale of its own.
    """
    wide_bias = None if bias is None else bias.float()
    if weight.dtype == torch.uint8:
        sums = _grouped(x, unpack_groups(weight, columns))
        return (sums if wide_bias is None else sums + wide_bias).to(x.dtype)
    wide = unpack(weight, columns, x.shape[-1]).float()
    return torch.nn.functional.linear(x.float(), wide, wide_bias).to(x.dtype)


def packed_expert_linear(x: Tensor, weight: Tensor, experts: Tensor, columns: int) -> Tensor:
    """Row p of `x [P, K]` times the weight of its expert, `weight` being packed from [E, columns, K]."""
    rows = [packed_linear(row, weight[expert], None, columns) for row, expert in zip(x, experts, strict=True)]
    return torch.stack(rows) if rows else x.new_empty((0, columns))


def packed_embedding(weight: Tensor, ids: Tensor, columns: int, depth: int) -> Tensor:
    """`W[ids]`, where `weight` is packed from W [columns, depth]; bfloat16 where W is in groups."""
    rows = unpack(weight, columns, depth)[ids]
    return rows.bfloat16() if weight.dtype == torch.uint8 else rows


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] -> integers from -127 to 127 [..., ceil(K / 32), 32] and their scales [..., ceil(K / 32)], float32."""
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    ranges = groups.abs().amax(-1)
    # `127 / ranges` would be the product with a reciprocal, which rounds twice.
    factors = torch.where(ranges > 1e-30, torch.full_like(ranges, 127) / ranges, 0)
    return (groups * factors.unsqueeze(-1)).round(), ranges / 127


def _grouped(x: Tensor, weight: Groups) -> Tensor:
    """[..., N] float32: products of what shares a scale in integers, scales in their order, chunks of steps in
    theirs."""
    kind = GROUP_KINDS[weight.kind]
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % kind.step))
    quants, x_scales = quantize_rows(x)
    parts = quants.unflatten(-1, (-1, kind.scaled)).flatten(-3, -2).double()  # [..., P, scaled]
    products = torch.einsum("...pk,npk->...np", parts, weight.numbers().flatten(-3, -2).double()).float()
    shifts = x_scales.repeat_interleave(GROUP // kind.scaled, -1) * parts.sum(-1).float()
    scales, least = (None if each is None else each.flatten(-2) for each in weight.wide_scales())
    assert scales is not None
    chunk = CHUNK_BYTES // kind.bytes * (kind.step // kind.scaled)
    sums = products.new_zeros(products.shape[:-1])
    for first in range(0, products.shape[-1], chunk):
        own = torch.zeros_like(sums)
        for part in range(first, min(first + chunk, products.shape[-1])):
            scale = x_scales[..., part * kind.scaled // GROUP, None]
            own = own + products[..., part] * (scales[:, part] * scale)
            if least is not None:
                own = own + shifts[..., part, None] * least[:, part]
        sums = sums + own
    return sums
