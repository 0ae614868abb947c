"""Tree attention as two TensorRT plugins, a kernel each: over splits of the cache, and their merge."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..case import Case
from ..plugin import DYNAMIC, FLOAT, Attributes, Dim, Plugin, Shapes, ceil_div, known, launched
from .blocks import LONG, MAX_SPLITS, PROGRAMS, merge_blocks, split_blocks


class AttendSplit(Plugin):
    """Attention over each split of the cache: a weighted mean per split, and the logarithm of its weight."""

    name = "tree_attention_split"
    inputs: ClassVar = {
        "q": FLOAT, "k": FLOAT, "v": FLOAT,
        "lengths": "int64", "depths": "int64", "ancestors": "int32", "key_depths": "int64",
    }  # fmt: skip
    outputs: ClassVar = {"split_out": "float32", "split_norm": "float32"}
    attributes: ClassVar = {"scale": float, "window": int, "softcap": float}

    def output_shapes(self, shapes: Shapes, attributes: Attributes, dims: Any) -> list[Sequence[Dim]]:
        batch, heads, nodes, _ = shapes["q"]
        programs = batch * ceil_div(heads * nodes, 64)
        splits = dims.max(dims.min(dims.constant(PROGRAMS) // programs, MAX_SPLITS), 1)
        return [(splits, batch, heads, nodes, shapes["v"][3]), (splits, batch, heads, nodes)]

    def scalars(self, shapes: Shapes) -> list[Dim]:
        (_, heads, nodes, _), (_, kv_heads, slots, _) = shapes["q"], shapes["k"]
        keys, words = shapes["key_depths"][1], shapes["ancestors"][2]
        contiguous = (shapes[name][1:] for name in ("q", "k", "v"))
        strides = [stride for heads, rows, size in contiguous for stride in (heads * rows * size, rows * size, size)]
        return [*strides, kv_heads, heads // kv_heads, nodes, keys, words, slots]

    def grid(self, shapes: Shapes, constants: Mapping[str, int]) -> tuple[Dim, Dim, Dim]:
        batch, heads, nodes, _ = shapes["q"]
        kv_heads = shapes["k"][1]
        tiles = ceil_div(heads // kv_heads * nodes, constants["BLOCK_R"])
        return shapes["split_out"][0], tiles, batch * kv_heads

    def case(self, dtype: str, shapes: Shapes, attributes: Attributes) -> Case:
        from .triton import attend_split_kernel

        _, heads, nodes, _ = shapes["q"]
        group = known(heads, "tree_attention: heads") // known(shapes["k"][1], "tree_attention: key heads")
        rows = group * (LONG if nodes == DYNAMIC else nodes)
        key_size = known(shapes["k"][3], "tree_attention: key head size")
        value_size = known(shapes["v"][3], "tree_attention: value head size")
        scale, softcap, window = (attributes[name] for name in ("scale", "softcap", "window"))
        size = 4 if dtype == "float32" else 2
        constants, options = launched(split_blocks(rows, key_size, value_size, size, softcap))
        constants |= {"SCALE": scale, "SOFTCAP": softcap, "WINDOW": window}
        constants |= {"D": key_size, "DV": value_size, "PROGRAMS": PROGRAMS}
        constants |= {"stride_qd": 1, "stride_kd": 1, "stride_vd": 1}
        aligned = key_size % 16 == value_size % 16 == 0
        return Case(self.name, attend_split_kernel, self.pointers(dtype), constants, options, aligned_strides=aligned)


class MergeSplits(Plugin):
    """The splits' means, weighted. `sinks` are one more logit per head, -inf for none; out has their dtype."""

    name = "tree_attention_merge"
    inputs: ClassVar = {"split_out": "float32", "split_norm": "float32", "sinks": FLOAT}
    outputs: ClassVar = {"out": FLOAT}

    def output_shapes(self, shapes: Shapes, attributes: Attributes, dims: Any) -> list[Sequence[Dim]]:
        _, batch, heads, nodes, size = shapes["split_out"]
        return [(batch, nodes, heads, size)]

    def scalars(self, shapes: Shapes) -> list[Dim]:
        splits, _, heads, nodes, _ = shapes["split_out"]
        return [heads, nodes, splits]

    def grid(self, shapes: Shapes, constants: Mapping[str, int]) -> tuple[Dim, Dim, Dim]:
        _, batch, heads, nodes, _ = shapes["split_out"]
        return batch * heads * nodes, 1, 1

    def case(self, dtype: str, shapes: Shapes, attributes: Attributes) -> Case:
        from .triton import merge_splits_kernel

        splits, *_, size = shapes["split_out"]
        most, size = MAX_SPLITS if splits == DYNAMIC else splits, known(size, "tree_attention: value head size")
        constants, options = launched(merge_blocks(most, size))
        constants |= {"HAS_SINKS": True, "DV": size}
        return Case(self.name, merge_splits_kernel, self.pointers(dtype), constants, options)
