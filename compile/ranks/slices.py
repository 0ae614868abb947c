"""Slices of weights, and what they become: what the whole weight does, cut at whole groups."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import BuildError
from ...kernels.linear.groups import GROUP_KINDS
from ...kernels.native import has_library
from ..inductor.exact import DTYPES
from ..precision import FP8, Precision, WeightForm
from ..writer import identity


class Slice(NamedTuple):
    """A weight, and what it is a slice of. start: its first element along K; None where it is some of the outputs."""

    weight: Tensor  # held, so that no other tensor gets its address
    whole: Tensor
    start: int | None


class OutputBlock(NamedTuple):
    """Outputs of a layer that lie one after the other in so many equal parts, and the number of the part that is
    taken."""

    size: int
    parts: int
    part: int


class Slices:
    """The slices that were cut of a model's weights. field: the build option that asks for them."""

    def __init__(self, field: str):
        self.field = field
        self.known: dict[tuple[Any, ...], Slice] = {}

    def cut(self, weight: Tensor, parts: int, name: str) -> list[Tensor]:
        """A weight [..., N, K] as [..., N, K / parts]: views where they will be packed, else dense, as a program takes
        what it is lent. Raises BuildError where K has no such part."""
        depth = weight.shape[-1]
        if depth % parts:
            raise BuildError(f"{self.field}: expected a divisor of the {depth} inputs of {name}, got {parts}")
        cut = list(weight.split(depth // parts, -1))
        if weight.is_cuda or weight.dtype not in DTYPES or not has_library():
            cut = [view.contiguous() for view in cut]
        for part, view in enumerate(cut):
            self.known[identity(view)] = Slice(view, weight, part * depth // parts)
        return cut

    def rows_of(self, weight: Tensor, blocks: Sequence[OutputBlock]) -> Tensor:
        """A part of the outputs of a weight [..., N, K], which lie in these blocks: that of each block, one after the
        other. A view where there is one block. Raises BuildError where a block has no such part."""
        if odd := [block for block in blocks if block.size % block.parts]:
            raise BuildError(
                f"{self.field}: expected a divisor of {odd[0].size} outputs of a layer, got {odd[0].parts}"
            )
        own, ends = [], accumulate(block.size for block in blocks)
        for block, end in zip(blocks, ends, strict=True):
            size = block.size // block.parts
            own.append(weight.narrow(-2, end - block.size + block.part * size, size))
        return self.note(own[0] if len(own) == 1 else torch.cat(own, -2), weight)

    def note(self, some: Tensor, weight: Tensor) -> Tensor:
        """Note that a tensor holds some of the outputs of a weight -> it."""
        self.known[identity(some)] = Slice(some, weight, None)
        return some

    def precision(self, of_whole: Precision) -> Precision:
        """What each weight becomes, slices among them, where `of_whole` says what whole weights become."""

        def form(weight: Tensor) -> WeightForm:
            found = self.known.get(identity(weight))
            if found is None:
                return of_whole(weight)
            whole = of_whole(found.whole)
            if whole.kind == FP8:
                return of_whole(weight)  # a slice may be too narrow for it
            if found.start is None or whole.kind not in GROUP_KINDS:
                return whole
            return WeightForm(whole.kind, lambda given: self._cut_groups(given, whole, found))

        return form

    def _cut_groups(self, given: Tensor, form: WeightForm, cut: Slice) -> Tensor:
        """The packed groups of a slice along K. Raises BuildError where it begins or ends in a group."""
        kind, depth = GROUP_KINDS[form.kind], given.shape[-1]
        assert cut.start is not None and given.shape == cut.weight.shape
        if cut.start % kind.step or depth % kind.step:
            raise BuildError(
                f"{self.field}: expected parts of a multiple of {kind.step} inputs, which lie together in weights of "
                f"{form.kind}, got {depth}; --weights bfloat16 takes any"
            )
        packed = form.make(cut.whole)
        return packed.narrow(-1 - len(kind.shape), cut.start // kind.step, depth // kind.step).contiguous()
