"""The best of a node's candidates as a TensorRT plugin."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..case import Case
from ..plugin import Attributes, Dim, Plugin, Shapes, known, launched
from .blocks import blocks


class Rank(Plugin):
    """The best of each node's candidates. See `reference.rank`."""

    name = "rank"
    inputs: ClassVar = {
        "tokens": "int64", "log_probs": "float32", "temperature": "float32", "seeds": "int64", "positions": "int64",
    }  # fmt: skip
    outputs: ClassVar = {"best": "int64", "scores": "float32"}
    attributes: ClassVar = {"top_k": int}

    def output_shapes(self, shapes: Shapes, attributes: Attributes, dims: Any) -> list[Sequence[Dim]]:
        batch, width, _ = shapes["tokens"]
        return [(batch, width, attributes["top_k"])] * 2

    def scalars(self, shapes: Shapes) -> list[Dim]:
        return [shapes["tokens"][1]]

    def grid(self, shapes: Shapes, constants: Mapping[str, int]) -> tuple[Dim, Dim, Dim]:
        batch, width, _ = shapes["tokens"]
        return batch * width, 1, 1

    def case(self, dtype: str, shapes: Shapes, attributes: Attributes) -> Case:
        from .triton import rank_kernel

        candidates = known(shapes["tokens"][2], "rank: candidates")
        constants, options = launched(blocks(candidates))
        constants |= {"C": candidates, "TOP_K": attributes["top_k"]}
        return Case(self.name, rank_kernel, self.pointers(dtype), constants, options)
