"""The normal form of a quantised weight: groups of 32 as our kernels have them where those say the same numbers, else
the numbers themselves."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.linear.groups import GROUP, GROUP_KINDS, Groups


class Rounded(NamedTuple):
    """Groups whose scales were rounded to float16, and the values that were meant. A float32 engine takes those."""

    groups: Groups
    values: Tensor


Weight = Groups | Rounded | Tensor  # [N, K]; a tensor is float32
ROUNDING = 2**-8  # the half of bfloat16's last place, of a number
E2M1_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # magnitudes of four bits


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [..., W] -> uint8 [..., W * 32 / bits], the lowest bits of each word first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(-2)


def unpack_halves(data: Tensor) -> Tensor:
    """uint8 [..., W] -> uint8 [..., 2 W], the lower half of each byte first."""
    return torch.stack([data & 15, data >> 4], -1).flatten(-2)


def four_bit_floats(codes: Tensor) -> Tensor:
    """Codes of E2M1, sign in the fourth bit -> float32."""
    return torch.where(codes >= 8, -1.0, 1.0) * E2M1_MAGNITUDES[(codes & 7).long()]


def four_bit_groups(kind: str, codes: Tensor, scales: Tensor) -> Weight:
    """Codes of E2M1 with scales of so many elements as the kind has.

    codes: uint8 [N, K]. scales: [N, S] float32. Scales that float16 does not hold are rounded to it where that moves
    numbers by at most an eighth of what bfloat16 may move them by, and those near zero by a 128th of what it may move
    the largest of their row by. Where it would move them more, the numbers are kept.
    """
    values = four_bit_floats(codes) * spread(scales, codes.shape[1])
    size = GROUP_KINDS[kind].scaled
    if codes.shape[1] % GROUP or codes.shape[1] // scales.shape[1] != size:
        return values
    halves = (scales / 2).half()  # the kinds' numbers are doubled
    groups = Groups(kind, codes.unflatten(1, (-1, GROUP)), halves.unflatten(1, (-1, GROUP // size)))
    size_of, off = scales.abs() / 2, (halves.float() - scales / 2).abs()
    if bool((off == 0).all()):
        return groups
    near = off <= torch.maximum(size_of, size_of.amax(1, keepdim=True) / 16) * ROUNDING / 8
    return Rounded(groups, values) if bool(near.all()) else values


def spread(scales: Tensor, size: int) -> Tensor:
    """[N, S], each for as many elements along K, or for them all -> [N, size]."""
    return scales.repeat_interleave(size // scales.shape[1], 1)


def scaled(quants: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Weight:
    """(quants - zeros) * scales. quants: uint8 [N, K]; scales: [N, S]; zeros: the same, integers."""
    values = (quants.float() - spread(zeros.float(), quants.shape[1])) * spread(scales.float(), quants.shape[1])
    middle = 2 ** (bits - 1)
    if bits not in (4, 8) or quants.shape[1] % GROUP or (quants.shape[1] // scales.shape[1]) % GROUP:
        return values
    if bool((zeros == middle).all()):
        return _kept({4: "int4", 8: "int8"}[bits], quants, scales, None, values)
    return values if bits == 8 else _kept("int4_least", quants, scales, -zeros.float() * scales.float(), values)


def with_least(quants: Tensor, scales: Tensor, least: Tensor, bits: int) -> Weight:
    """quants * scales + least. quants: uint8 [N, K]; scales, least: [N, S]."""
    values = quants.float() * spread(scales.float(), quants.shape[1]) + spread(least.float(), quants.shape[1])
    if bits != 4 or quants.shape[1] % GROUP or (quants.shape[1] // scales.shape[1]) % GROUP:
        return values
    return _kept("int4_least", quants, scales, least, values)


def _kept(kind: str, quants: Tensor, scales: Tensor, least: Tensor | None, values: Tensor) -> Weight:
    """Groups of float16 scales where they say the same, else the values. A least value may be rounded to float16, which
    moves its group by less than a hundredth of a step; bfloat16 would move the largest values by more."""
    groups = quants.shape[1] // GROUP
    halves = [None if part is None else spread(part, groups).half().unsqueeze(-1) for part in (scales, least)]
    assert halves[0] is not None
    found = Groups(kind, quants.unflatten(1, (groups, GROUP)), halves[0], halves[1])
    exact = torch.equal(halves[0].float().squeeze(-1), spread(scales.float(), groups))
    step = spread(scales.float().abs(), quants.shape[1])
    near = least is None or bool(((found.values(quants.shape[1]) - values).abs() <= step / 100).all())
    return found if exact and near else values
