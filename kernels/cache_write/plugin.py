"""Cache writes as a TensorRT plugin: in place, where ScatterND would copy the cache in every layer and step."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..case import Case
from ..plugin import FLOAT, Attributes, Dim, Plugin, Shapes, ceil_div, known, power_of_2


class CacheWrite(Plugin):
    """ScatterND on a cache [B, H, S, D]: rows [B, H, T, D] to indices [B, H, T, 3]."""

    name = "cache_write"
    inputs: ClassVar = {"cache": FLOAT, "indices": "int64", "rows": FLOAT}
    outputs: ClassVar = {"written": FLOAT}
    aliases: ClassVar = {0: 0}

    def output_shapes(self, shapes: Shapes, attributes: Attributes, dims: Any) -> list[Sequence[Dim]]:
        return [shapes["cache"]]

    def scalars(self, shapes: Shapes) -> list[Dim]:
        batch, heads, tokens, _ = shapes["rows"]
        return [*shapes["cache"][:3], batch * heads * tokens]

    def grid(self, shapes: Shapes, constants: Mapping[str, int]) -> tuple[Dim, Dim, Dim]:
        batch, heads, tokens, _ = shapes["rows"]
        return ceil_div(batch * heads * tokens, constants["BLOCK_N"]), 1, 1

    def case(self, dtype: str, shapes: Shapes, attributes: Attributes) -> Case:
        from .triton import cache_write_kernel

        size = known(shapes["cache"][3], "cache_write: head size")
        constants = {"D": size, "BLOCK_N": 8, "BLOCK_D": power_of_2(size)}
        return Case(self.name, cache_write_kernel, self.pointers(dtype), constants)
