"""Weights in groups of 32 along K, a few bits each with scales of their own, as GGUF has them.

The kinds have GGUF's names, but for `int8` (its q8_0), `int4` (q4_0), `int4_least` (q4_1), `int5` (q5_0) and
`int5_least` (q5_1).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32  # elements along K
OUTPUTS = 16  # of a panel
UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of iq4_nl and iq4_xs
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled


class GroupKind(NamedTuple):
    """How weights of a kind lie."""

    planes: tuple[int, ...]  # bits of a quant, plane by plane: (4, 1) is five bits
    offset: int = 0  # subtracted from a quant, where there are no `values`
    # The number that each quant stands for, before its scale; None: quant - offset.
    values: tuple[int, ...] | None = None
    least: bool = False  # each scale has a least value beside it, which is added
    scaled: int = GROUP  # elements along K that share a scale
    groups: int = 1  # groups of 32 in a step; of more than one, scales are int8, times a float16 factor of the step
    cut: int = 1  # leading size that the packed bytes of a step are split by: it tells kinds of one size apart

    @property
    def bits(self) -> int:
        """Of a quant."""
        return sum(self.planes)

    @property
    def step(self) -> int:
        """Elements along K that lie together."""
        return self.groups * GROUP

    @property
    def bytes(self) -> int:
        """Of one step of a panel: quants, scales, least values, factors."""
        factored = self.groups > 1
        of_scales = self.step // self.scaled * (1 if factored else 2) + (2 if factored else 0)
        return OUTPUTS * (self.step * self.bits // 8 + of_scales * (2 if self.least else 1))

    @property
    def shape(self) -> tuple[int, ...]:
        """The last dimensions of a packed weight: a step of a panel."""
        return (self.bytes,) if self.cut == 1 else (self.cut, self.bytes // self.cut)


GROUP_KINDS = {
    "int8": GroupKind((8,), 128),
    "int4": GroupKind((4,), 8),
    "int4_least": GroupKind((4,), least=True),
    "int5": GroupKind((4, 1), 16),
    "int5_least": GroupKind((4, 1), least=True),
    "q2_k": GroupKind((2,), least=True, scaled=16, groups=8),
    "q3_k": GroupKind((2, 1), 4, scaled=16, groups=8),
    "q4_k": GroupKind((4,), least=True, groups=8),
    "q5_k": GroupKind((4, 1), least=True, groups=8),
    "q6_k": GroupKind((4, 2), 32, scaled=16, groups=8),
    "iq4_nl": GroupKind((4,), values=UNEVEN, cut=16),
    "iq4_xs": GroupKind((4,), values=UNEVEN, groups=8),
    "mxfp4": GroupKind((4,), values=E2M1_DOUBLED, cut=2),
    "nvfp4": GroupKind((4,), values=E2M1_DOUBLED, scaled=16, cut=2),
}
LAST = {kind.shape[-1]: name for name, kind in GROUP_KINDS.items()}  # they tell the kinds of packed weights apart


class Groups(NamedTuple):
    """A weight [..., N, K] in S steps along K."""

    kind: str  # of GROUP_KINDS
    quants: Tensor  # uint8 [..., N, S, step]
    scales: Tensor  # float16 [..., N, S, step / scaled]; int8 where a step has factors
    least: Tensor | None = None  # like scales; None: the kind has no least values
    # Float16 [..., N, S, 1], or 2 with that of the least values; None: a step is one group.
    factors: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> "Groups":
        """The same with every tensor changed."""
        changed = [None if part is None else change(part) for part in self[1:]]
        return Groups(self.kind, *changed)  # type: ignore[arg-type]

    def wide_scales(self) -> tuple[Tensor, Tensor | None]:
        """Scales and least values [..., N, S, step / scaled] in float32, with the factors."""
        scales, least = self.scales.float(), None if self.least is None else self.least.float()
        if self.factors is not None:
            factors = self.factors.float()
            scales, least = scales * factors[..., :1], None if least is None else least * factors[..., 1:]
        return scales, least

    def numbers(self) -> Tensor:
        """What the scales multiply: [..., N, S, step / scaled, scaled] float32."""
        kind = GROUP_KINDS[self.kind]
        if kind.values is not None:
            wide = torch.tensor(kind.values, dtype=torch.float32)[self.quants.long()]
        else:
            wide = self.quants.float() - kind.offset
        return wide.unflatten(-1, (-1, kind.scaled))

    def values(self, depth: int) -> Tensor:
        """The weight that they stand for, [..., N, depth] float32."""
        scales, least = self.wide_scales()
        values = self.numbers() * scales.unsqueeze(-1)
        if least is not None:
            values += least.unsqueeze(-1)
        return values.flatten(-3)[..., :depth]


def pack_groups(groups: Groups) -> Tensor:
    """Interleave 16 outputs: [..., ceil(N / 16), S, *kind.shape] uint8, contiguous, where a step of a panel holds the
    planes of each group's quants, then scales, least values and factors. Outputs beyond N are zeros.

    A plane of w bits has w words of four bytes for each output: word i has the bits of the quants 4 i to 4 i + 3 in the
    lowest bits of its bytes, above them those of word i + w, and so on.
    """
    kind = GROUP_KINDS[groups.kind]
    of_groups = _in_panels(groups.quants).unflatten(-1, (kind.groups, GROUP))
    planes, low = [], 0
    for width in kind.planes:
        held = (of_groups >> low & (2**width - 1)).unflatten(-1, (8 // width, width, 4))
        planes.append((held << _shifts(width)).sum(-3, dtype=torch.uint8))
        low += width
    parts = [torch.cat(planes, -2).movedim(-5, -2).flatten(-4)]  # [..., panel, step, group, word, output, byte]
    for values in (groups.scales, groups.least, groups.factors):
        if values is not None:
            parts.append(_viewed(_in_panels(values).movedim(-3, -1).contiguous(), torch.uint8).flatten(-2))
    return torch.cat(parts, -1).unflatten(-1, kind.shape).contiguous()


def unpack_groups(packed: Tensor, columns: int) -> Groups:
    """The groups [..., columns, ...] that were packed."""
    name = LAST[packed.shape[-1]]
    kind = GROUP_KINDS[name]
    flat = packed.flatten(-len(kind.shape))
    words = flat[..., : OUTPUTS * kind.step * kind.bits // 8].unflatten(-1, (kind.groups, kind.bits, OUTPUTS, 4))
    of_groups, quants, low = words.movedim(-2, -5), torch.zeros((), dtype=torch.uint8), 0
    for width in kind.planes:
        held = of_groups[..., low : low + width, :].unsqueeze(-3) >> _shifts(width)
        quants = quants | (held & (2**width - 1)).flatten(-3) << low
        low += width
    at, places = OUTPUTS * kind.step * kind.bits // 8, kind.step // kind.scaled
    factored = kind.groups > 1
    scales = torch.int8 if factored else torch.float16
    held_parts: list[Tensor | None] = []
    for count, dtype in ((places, scales), (places * kind.least, scales), (factored * (1 + kind.least), torch.float16)):
        part = flat[..., at : at + OUTPUTS * count * dtype.itemsize]
        at += part.shape[-1]
        values = _viewed(part.unflatten(-1, (count, -1)), dtype).movedim(-1, -3) if count else None
        held_parts.append(values)
    return Groups(name, quants.flatten(-2), *held_parts).each(lambda part: part.flatten(-4, -3)[..., :columns, :, :])  # type: ignore[arg-type]


def _shifts(width: int) -> Tensor:
    return torch.arange(0, 8, width, dtype=torch.uint8).view(-1, 1, 1)


def _in_panels(values: Tensor) -> Tensor:
    """[..., N, S, x] -> [..., ceil(N / 16), 16, S, x], zeros beyond N."""
    padded = torch.nn.functional.pad(values, (0, 0, 0, 0, 0, -values.shape[-3] % OUTPUTS))
    return padded.unflatten(-3, (-1, OUTPUTS))


def _viewed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bits as another dtype, also where there are none."""
    *leading, last = values.shape
    return values.flatten().view(dtype).view(*leading, last * values.element_size() // dtype.itemsize)
