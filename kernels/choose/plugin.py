"""The choice as a TensorRT plugin."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..case import Case
from ..plugin import FLOAT, Attributes, Dim, Plugin, Shapes, ceil_div, known, power_of_2

BLOCK_V = 4096  # logits that a program reads at once
LIST = 4096  # processed logits that it searches in registers


def scratch_size(vocabulary: Dim) -> Dim:
    """Numbers that a program works with in memory: a row of processed logits in whole blocks, and gathered ones."""
    return ceil_div(vocabulary, BLOCK_V) * BLOCK_V + LIST


def blocks(nodes: int, biases: int, bans: int) -> dict[str, int]:
    """Block sizes and options of the kernel; none spills (see compile_cubin)."""
    sizes = {"BLOCK_T": nodes, "BLOCK_E": biases, "BLOCK_X": bans}
    return {
        "BLOCK_V": BLOCK_V,
        "BLOCK_N": 1024,
        **{name: power_of_2(size) for name, size in sizes.items()},
        "num_warps": 8,
    }


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

        sizes = {"nodes": shapes["tokens"][1], "biases": shapes["bias_ids"][1], "bans": shapes["banned"][2]}
        constants = blocks(**{name: known(size, f"choose: {name}") for name, size in sizes.items()})
        options = {"num_warps": constants.pop("num_warps")}
        constants |= {"V": known(shapes["logits"][2], "choose: vocabulary"), "LIST": LIST}
        return Case(self.name, choose_kernel, self.pointers(dtype), constants, options)
