"""The quantised groups of a model's file, found again by the values that they stand for.

A file's weights are widened when they are loaded, and their rows may be reordered, split, stacked or turned. Rows stay
whole, so each row of a weight is looked up among the rows of the file. Of several that are equal in bfloat16 the first
is taken.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.linear.groups import Groups

ROWS = 4096  # hashed, or packed, at once: a multiple of the outputs of a panel
WORD = 4  # numbers of bfloat16 in an int64


class KeptWeight(NamedTuple):
    """A weight [N, K] of a file. kind: of `groups.GROUP_KINDS`. read: rows, as an index of numpy's, -> their groups."""

    kind: str
    rows: int
    depth: int
    read: Callable[[Any], Groups]


class _Kind(NamedTuple):
    """Rows of one kind and depth: their hashes, sorted, and where each lies: its weight and its row."""

    hashes: Tensor
    weights: Tensor
    rows: Tensor


class KeptGroups:
    """The rows of all weights of a file that are in groups."""

    def __init__(self, weights: Sequence[KeptWeight]):
        self.weights, self.kinds = weights, dict[tuple[str, int], _Kind]()
        found: dict[tuple[str, int], list[tuple[Tensor, int]]] = {}
        for number, weight in enumerate(weights):
            parts = [_hash(weight.read(slice(at, at + ROWS)).values(weight.depth).bfloat16())
                     for at in range(0, weight.rows, ROWS)]  # fmt: skip
            found.setdefault((weight.kind, weight.depth), []).append((torch.cat(parts), number))
        for key, parts_of in found.items():
            hashes, order = torch.cat([hashes for hashes, _ in parts_of]).sort(stable=True)
            numbers = torch.cat([torch.full_like(part, number) for part, number in parts_of])
            rows_of = torch.cat([torch.arange(len(part)) for part, _ in parts_of])
            self.kinds[key] = _Kind(hashes, numbers[order], rows_of[order])

    def kind(self, weight: Tensor) -> str | None:
        """The kind, of `groups.GROUP_KINDS`, that all rows of a weight [..., N, K] have; None if there is none."""
        found = self._find(weight)
        return found and found[0]

    def groups(self, weight: Tensor, kind: str | None = None) -> Groups:
        """The groups of a weight [..., N, K] that has a kind; of part of one, that of the whole, since rows of zeros
        have several. Raises ValueError for another one."""
        found = self._find(weight, kind)
        if found is None:
            raise ValueError(f"weight: expected rows of the model's file, got {tuple(weight.shape)} {weight.dtype}")
        name, places = found
        depth = weight.shape[-1]
        flat = weight.reshape(-1, depth)
        numbers, rows = self.kinds[name, depth].weights[places], self.kinds[name, depth].rows[places]
        held: Groups | None = None
        for number in numbers.unique().tolist():
            own = numbers == number
            read = self.weights[number].read(rows[own].numpy())
            held = held or read.each(lambda part: part.new_empty(len(rows), *part.shape[1:]))
            for whole, part in zip(held[1:], read[1:], strict=True):
                if whole is not None:
                    whole[own] = part
        assert held is not None
        for at in range(0, len(flat), ROWS):
            part = held.each(lambda part, at=at: part[at : at + ROWS])  # type: ignore[misc]
            if not torch.equal(part.values(depth).bfloat16(), flat[at : at + ROWS]):  # two rows of one hash
                raise ValueError("weight: expected the values of the file's groups, got others")
        return held.each(lambda part: part.view(*weight.shape[:-1], *part.shape[1:]))

    def _find(self, weight: Tensor, kind: str | None = None) -> tuple[str, Tensor] | None:
        """The kind that all rows of a weight have, and their places in it; None if there is none. kind: the only one
        that is looked for."""
        if weight.dtype != torch.bfloat16 or weight.numel() == 0:
            return None
        depth = weight.shape[-1]
        hashes = torch.cat([_hash(rows) for rows in weight.reshape(-1, depth).split(ROWS)])
        for name, other in self.kinds:
            if other == depth and kind in (None, name):
                held = self.kinds[name, depth].hashes
                places = torch.searchsorted(held, hashes).clamp(max=len(held) - 1)
                if torch.equal(held[places], hashes):
                    return name, places
        return None


def _hash(rows: Tensor) -> Tensor:
    """[N, K] bfloat16 -> [N] int64: the same for the same numbers. Zeros lose their sign, which groups of four-bit
    floats do not keep."""
    held = (rows + 0.0).contiguous().view(torch.int16)
    words = F.pad(held, (0, -held.shape[-1] % WORD)).view(torch.int64)
    mixed = words ^ (words >> 32 & 0xFFFFFFFF)  # a factor says little of what differs in high bits alone
    return mixed @ _factors(words.shape[-1])


@cache
def _factors(count: int) -> Tensor:
    """Numbers at random. Sums of their products with different words are the same once in 2^32, or less often."""
    made = torch.Generator().manual_seed(count)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=made)
