"""What lowering gives: packages in an engine's directory, and what they are lent."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .stored_program import Packed


@dataclass(frozen=True)
class Compiled:
    """NAME.pt2 of each program lies in the engine's directory."""

    constants: dict[str, dict[str, Tensor]]  # program -> the weights that it is lent, by name
    packed: list[Packed]  # those of them that were packed, in the order in which they were
    stages: dict[str, dict[str, int]]  # see `Lowered`
    inexact: list[str]  # why drafts may change a text
    operators: dict[str, int]  # see `count_operators`
    keys: dict[str, str]  # program -> where the user's cache keeps its package; empty: it does not
    others: tuple[dict[str, dict[str, Tensor]], ...] = ()  # `constants` of ranks 1, 2, ...

    def details(self) -> dict[str, Any]:
        """Further fields of the manifest: what the packed weights of each kind take in memory, and the operators."""
        kinds = dict.fromkeys((weight.kind for weight in self.packed), 0)
        for weight in self.packed:
            kinds[weight.kind] += weight.tensor.nbytes
        return {"weights": kinds, "operators": self.operators}
