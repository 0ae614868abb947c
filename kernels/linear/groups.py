"""Weights in groups of 32 along K, a few bits each with a scale of their own, as GGUF has them.

`int8` is GGUF's q8_0, `int4` its q4_0, `int4_least` its q4_1, which has the least value of each group beside its scale.
"""

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32  # elements along K
OUTPUTS = 16  # of a panel


class Kind(NamedTuple):
    """bits: of a quant. offset: how much more a quant is than the number that the scale multiplies. least: whether a
    group has a least value, which is added."""

    bits: int
    offset: int
    least: bool

    @property
    def bytes(self) -> int:
        """Of one group of a panel: quants, scales, least values."""
        return OUTPUTS * (GROUP * self.bits // 8 + (4 if self.least else 2))


KINDS = {"int8": Kind(8, 128, False), "int4": Kind(4, 8, False), "int4_least": Kind(4, 0, True)}
BYTES = {kind.bytes: name for name, kind in KINDS.items()}  # they tell the kinds of packed weights apart


class Groups(NamedTuple):
    """A weight [..., N, K]. kind: of KINDS. quants: [..., N, ceil(K / 32), 32] uint8. scales, least: [..., N, ceil(K /
    32)] float16, least None where the kind has none."""

    kind: str
    quants: Tensor
    scales: Tensor
    least: Tensor | None

    def values(self, depth: int) -> Tensor:
        """The weight that they stand for, [..., N, depth] float32."""
        values = (self.quants.float() - KINDS[self.kind].offset) * self.scales.float().unsqueeze(-1)
        if self.least is not None:
            values += self.least.float().unsqueeze(-1)
        return values.flatten(-2)[..., :depth]


def quantize_int8(weight: Tensor) -> Groups:
    """A floating-point weight [..., N, K] to the nearest of 255 multiples of each group's scale; the largest element
    becomes 127 or -127."""
    groups = _in_groups(weight)
    scales = (groups.abs().amax(-1) / 127).half()
    quants = _nearest(groups, scales, -127, 127)
    return Groups("int8", (quants + 128).to(torch.uint8), scales, None)


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
    return Groups("int4", (quants + 8).to(torch.uint8), scales, None)


def _in_groups(weight: Tensor) -> Tensor:
    wide = torch.nn.functional.pad(weight.float(), (0, -weight.shape[-1] % GROUP))
    return wide.unflatten(-1, (-1, GROUP))


def _nearest(groups: Tensor, scales: Tensor, low: int, high: int) -> Tensor:
    """Multiples of the scales, as float32; 0 where a scale is too small for float16."""
    wide = scales.float().unsqueeze(-1)
    return torch.where(wide == 0, 0, groups / wide).round().clamp(low, high)


def pack_groups(groups: Groups) -> Tensor:
    """Interleave 16 outputs: [..., ceil(N / 16), ceil(K / 32), bytes] uint8, contiguous, where the bytes of a step are
    quants by words of four along K (of 4 bits: elements 0 to 15 in the lower halves, 16 to 31 in the upper ones), then
    scales, then least values. Outputs beyond N are zeros."""
    bits, panels = KINDS[groups.kind].bits, -groups.quants.shape[-3] % OUTPUTS
    quants = torch.nn.functional.pad(groups.quants, (0, 0, 0, 0, 0, panels))
    if bits == 4:
        quants = quants[..., :16] | quants[..., 16:] << 4
    words = quants.unflatten(-1, (-1, 4)).unflatten(-4, (-1, OUTPUTS))  # [..., panel, output, step, word, byte]
    parts = [words.movedim(-4, -2).flatten(-3)]
    for values in (groups.scales, groups.least):
        if values is not None:
            padded = torch.nn.functional.pad(values, (0, 0, 0, panels)).unflatten(-2, (-1, OUTPUTS))
            parts.append(_viewed(padded.transpose(-1, -2), torch.uint8))
    return torch.cat(parts, -1)


def unpack_groups(packed: Tensor, columns: int) -> Groups:
    """The groups [..., columns, ...] that were packed."""
    name = BYTES[packed.shape[-1]]
    kind = KINDS[name]
    held = OUTPUTS * GROUP * kind.bits // 8
    words = packed[..., :held].unflatten(-1, (-1, OUTPUTS, 4)).movedim(-2, -4)  # [..., panel, output, step, word, byte]
    quants = words.flatten(-2).flatten(-4, -3)
    if kind.bits == 4:
        quants = torch.cat([quants & 15, quants >> 4], -1)
    halves = [_viewed(part, torch.float16) for part in packed[..., held:].split(OUTPUTS * 2, -1)]
    flat = [half.transpose(-1, -2).flatten(-3, -2)[..., :columns, :] for half in halves]
    return Groups(name, quants[..., :columns, :, :], flat[0], flat[1] if kind.least else None)


def _viewed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bits as another dtype, also where there are none."""
    *leading, last = values.shape
    return values.flatten().view(dtype).view(*leading, last * values.element_size() // dtype.itemsize)
