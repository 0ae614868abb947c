"""Acceptance as a TensorRT plugin."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..case import Case
from ..plugin import Attributes, Dim, Plugin, Shapes, known, launched
from .blocks import blocks


class Accept(Plugin):
    """The accepted path of each tree. See `reference.accept`."""

    name = "accept"
    inputs: ClassVar = {
        "tokens": "int64", "parents": "int64", "valid": "bool",
        "ancestors": "int32", "depths": "int64", "choice": "int64",
    }  # fmt: skip
    outputs: ClassVar = {"path": "int64", "accepted": "int64"}
    attributes: ClassVar = {"max_depth": int}

    def output_shapes(self, shapes: Shapes, attributes: Attributes, dims: Any) -> list[Sequence[Dim]]:
        batch = shapes["tokens"][0]
        return [(batch, attributes["max_depth"] + 1), (batch,)]

    def scalars(self, shapes: Shapes) -> list[Dim]:
        return [shapes["tokens"][1], shapes["ancestors"][2], shapes["path"][1]]

    def grid(self, shapes: Shapes, constants: Mapping[str, int]) -> tuple[Dim, Dim, Dim]:
        return shapes["tokens"][0], 1, 1

    def case(self, dtype: str, shapes: Shapes, attributes: Attributes) -> Case:
        from .triton import accept_kernel

        words = known(shapes["ancestors"][2], "accept: words")
        return Case(
            self.name, accept_kernel, self.pointers(dtype), *launched(blocks(words, attributes["max_depth"] + 1))
        )
