"""Tree layout as a TensorRT plugin."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..case import Case
from ..plugin import Attributes, Dim, Plugin, Shapes, ceil_div, known, launched
from .blocks import blocks


class TreeLayout(Plugin):
    """Packed ancestors and depths. See `reference.tree_layout`."""

    name = "tree_layout"
    inputs: ClassVar = {"parents": "int64", "valid": "bool"}
    outputs: ClassVar = {"ancestors": "int32", "depths": "int64"}

    def output_shapes(self, shapes: Shapes, attributes: Attributes, dims: Any) -> list[Sequence[Dim]]:
        batch, nodes = shapes["parents"]
        return [(batch, nodes, ceil_div(nodes, 32)), (batch, nodes)]

    def scalars(self, shapes: Shapes) -> list[Dim]:
        return [shapes["parents"][1], shapes["ancestors"][2]]

    def grid(self, shapes: Shapes, constants: Mapping[str, int]) -> tuple[Dim, Dim, Dim]:
        batch, nodes = shapes["parents"]
        return batch, ceil_div(nodes, constants["BLOCK_T"]), 1

    def case(self, dtype: str, shapes: Shapes, attributes: Attributes) -> Case:
        from .triton import tree_layout_kernel

        words = ceil_div(known(shapes["parents"][1], "tree_layout: nodes"), 32)
        return Case(self.name, tree_layout_kernel, self.pointers(dtype), *launched(blocks(words)))
