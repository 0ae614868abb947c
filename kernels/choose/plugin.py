"""The choice as a TensorRT plugin."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..case import Case
from ..plugin import FLOAT, Attributes, Dim, Plugin, Shapes, known, launched
from .blocks import LIST, blocks, scratch_size


class Choose(Plugin):
    """The token after each node. See `reference.choose`. `scratch` is memory that the kernel works in."""

    name = "choose"
    inputs: ClassVar = {
        "logits": FLOAT, "tokens": "int64", "ancestors": "int32", "depths": "int64", "history": "int64",
        "lengths": "int64", "prompt_lengths": "int64", "sampling": "float32", "seeds": "int64", "bias_ids": "int64",
        "bias": "float32", "banned": "int64", "allowed": "int32", "masked": "int64",
    }  # fmt: skip
    outputs: ClassVar = {"choice": "int64", "scratch": "float32"}

    def output_shapes(self, shapes: Shapes, attributes: Attributes, dims: Any) -> list[Sequence[Dim]]:
        batch, nodes, vocabulary = shapes["logits"]
        return [(batch, nodes), (batch, nodes, scratch_size(vocabulary))]

    def scalars(self, shapes: Shapes) -> list[Dim]:
        sizes = {name: shapes[name] for name in ("ancestors", "history", "bias_ids", "banned")}
        return [shapes["tokens"][1], *(size[-1] for size in sizes.values())]

    def grid(self, shapes: Shapes, constants: Mapping[str, int]) -> tuple[Dim, Dim, Dim]:
        batch, nodes = shapes["tokens"]
        return batch * nodes, 1, 1

    def case(self, dtype: str, shapes: Shapes, attributes: Attributes) -> Case:
        from .triton import choose_kernel

        sizes = {"words": shapes["ancestors"][2], "biases": shapes["bias_ids"][1], "bans": shapes["banned"][2]}
        constants, options = launched(blocks(**{name: known(size, f"choose: {name}") for name, size in sizes.items()}))
        constants |= {"V": known(shapes["logits"][2], "choose: vocabulary"), "LIST": LIST}
        return Case(self.name, choose_kernel, self.pointers(dtype), constants, options)
