"""The likeliest tokens as a TensorRT plugin."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..case import Case
from ..plugin import FLOAT, Attributes, Dim, Plugin, Shapes, known, launched
from .blocks import blocks


class TopLogProbs(Plugin):
    """The likeliest tokens of some nodes. See `reference.top_log_probs`; `ids` and the mask are always given."""

    name = "top_log_probs"
    inputs: ClassVar = {
        "logits": FLOAT, "nodes": "int64", "wanted": "int64", "temperature": "float32", "seeds": "int64",
        "positions": "int64", "ids": "int64", "allowed": "int32", "masked": "int64",
    }  # fmt: skip
    outputs: ClassVar = {"tokens": "int64", "log_probs": "float32", "total": "float32"}
    attributes: ClassVar = {"top": int}

    def output_shapes(self, shapes: Shapes, attributes: Attributes, dims: Any) -> list[Sequence[Dim]]:
        batch, places = shapes["nodes"]
        return [(batch, places, attributes["top"]), (batch, places, attributes["top"]), (batch, places)]

    def scalars(self, shapes: Shapes) -> list[Dim]:
        return [shapes["logits"][1], shapes["nodes"][1], shapes["allowed"][2]]

    def grid(self, shapes: Shapes, constants: Mapping[str, int]) -> tuple[Dim, Dim, Dim]:
        batch, places = shapes["nodes"]
        return batch * places, 1, 1

    def case(self, dtype: str, shapes: Shapes, attributes: Attributes) -> Case:
        from .triton import top_log_probs_kernel

        vocabulary, top = known(shapes["logits"][2], "top_log_probs: vocabulary"), attributes["top"]
        constants, options = launched(blocks(vocabulary, top))
        constants |= {"HAS_IDS": True, "HAS_MASK": True, "V": vocabulary, "TOP": top}
        return Case(self.name, top_log_probs_kernel, self.pointers(dtype), constants, options)
