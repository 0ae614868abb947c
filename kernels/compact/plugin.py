"""Cache compaction as a TensorRT plugin: one cache per node, in place."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..case import Case
from ..plugin import DYNAMIC, FLOAT, Attributes, Dim, Plugin, Shapes, known, launched
from .blocks import MOST_LEVELS, blocks


class Compact(Plugin):
    """The accepted path of one cache moves to the end of the committed tokens. See `reference.compact`."""

    name = "compact"
    inputs: ClassVar = {"cache": FLOAT, "lengths": "int64", "path": "int64", "accepted": "int64"}
    outputs: ClassVar = {"compacted": FLOAT}
    aliases: ClassVar = {0: 0}

    def output_shapes(self, shapes: Shapes, attributes: Attributes, dims: Any) -> list[Sequence[Dim]]:
        return [shapes["cache"]]

    def scalars(self, shapes: Shapes) -> list[Dim]:
        _, heads, slots, size = shapes["cache"]
        return [shapes["path"][1], slots, heads * slots * size, slots * size, size]

    def grid(self, shapes: Shapes, constants: Mapping[str, int]) -> tuple[Dim, Dim, Dim]:
        return shapes["cache"][0], shapes["cache"][1], 1

    def case(self, dtype: str, shapes: Shapes, attributes: Attributes) -> Case:
        from .triton import compact_cache_kernel

        size, path_length = known(shapes["cache"][3], "compact: head size"), shapes["path"][1]
        constants, options = launched(blocks(MOST_LEVELS if path_length == DYNAMIC else path_length - 1, size))
        constants["D"] = size
        pointers, aligned = self.pointers(dtype), size % 16 == 0
        return Case(self.name, compact_cache_kernel, pointers, constants, options, aligned_strides=aligned)
