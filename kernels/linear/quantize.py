"""Quantises floating-point weights to groups of 32: see `groups`."""

import torch
from torch import Tensor

from .groups import GROUP, Groups


def quantize_int8(weight: Tensor) -> Groups:
    """A floating-point weight [..., N, K] to the nearest of 255 multiples of each group's scale; the largest element
    becomes 127 or -127."""
    groups = _in_groups(weight)
    scales = (groups.abs().amax(-1) / 127).half()
    quants = _nearest(groups, scales, -127, 127)
    return Groups("int8", (quants + 128).to(torch.uint8), scales.unsqueeze(-1))


def quantize_int4(weight: Tensor) -> Groups:
    """A floating-point weight [..., N, K] to -8 to 7 times each group's scale. Of several scales near the one that
    makes the largest element -8, that of the least squared error."""
    groups = _in_groups(weight)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    best = torch.full_like(largest, float("inf"))
    scales, quants = torch.zeros_like(largest, dtype=torch.float16), torch.zeros_like(groups)
    for step in range(-6, 9):  # beside its neighbours, a largest element of -6.8 to -9.6
        tried = (largest / (step * 0.2 - 8)).half()
        rounded = _nearest(groups, tried, -8, 7)
        error = (rounded * tried.float().unsqueeze(-1) - groups).square().sum(-1)
        better = error < best
        best, scales = torch.where(better, error, best), torch.where(better, tried, scales)
        quants = torch.where(better.unsqueeze(-1), rounded, quants)
    return Groups("int4", (quants + 8).to(torch.uint8), scales.unsqueeze(-1))


def _in_groups(weight: Tensor) -> Tensor:
    wide = torch.nn.functional.pad(weight.float(), (0, -weight.shape[-1] % GROUP))
    return wide.unflatten(-1, (-1, GROUP))


def _nearest(groups: Tensor, scales: Tensor, low: int, high: int) -> Tensor:
    """Multiples of the scales, as float32; 0 where a scale is too small for float16."""
    wide = scales.float().unsqueeze(-1)
    return torch.where(wide == 0, 0, groups / wide).round().clamp(low, high)
