"""Rewrites of exported programs before they are compiled for a GPU, where each launch costs a few microseconds: one
product for layers that read the same x, and cache writes that the compiler fuses with what computes keys and values."""

from collections.abc import Collection
from itertools import pairwise
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ..kernels.kv_write.op import kv_write
from .gpu_writes import lower_writes
from .packed_weights import Call, joined_layers, replace_layers
from .precision import Form, plain
from .rewrites import insert_call
from .stored_program import PackedTensors, StoredProgram

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
aten = torch.ops.aten


def rewrite_for_gpu(exported: Collection[ExportedProgram]) -> None:
    """Rewrite programs over the same weights, in place. A text stays the same, but for the rounding of products."""
    lower_writes()
    _join_layers(exported)
    for program in exported:
        _join_writes(program)


def _join_layers(exported: Collection[ExportedProgram]) -> None:
    """Linear layers of one x become one layer and slices of its output, where they do in every program. A weight of
    several programs is joined once; one that nothing else uses is gone."""
    packed = PackedTensors(plain)
    programs = [StoredProgram(program, packed, "cuda", DTYPES) for program in exported]
    for program, runs in zip(programs, joined_layers(programs, outputs=1), strict=True):
        for layers in runs:
            if len(layers) > 1:
                kind = str(layers[0].meta["val"].dtype).removeprefix("torch.")
                replace_layers(program, layers, Form(kind, torch.clone), _linear)
        program.drop_unused()


def _linear(x: Node, weight: Node, bias: Any, columns: int) -> Call:
    return aten.linear.default, (x, weight, bias)


def _join_writes(exported: ExportedProgram) -> None:
    """The writes of a layer's keys and values, `index_put_` one after the other, become `specstep::kv_write`. That
    keeps the strides that a cache has: behind `index_put_` the compiler takes a cache for a new tensor, and copies it
    for a kernel of ours."""
    writes = exported.graph.find_nodes(op="call_function", target=aten.index_put_.default)
    writes = [node for node in writes if len(node.args[1]) == 3]
    for keys, values in list(pairwise(writes))[::2]:
        where = _where(keys)
        if where is None or where != _where(values):
            raise AssertionError(f"cache writes: expected those of keys and values in turn, got {keys} and {values}")
        arguments = (keys.args[0], values.args[0], keys.args[2], values.args[2], *where)
        with exported.graph.inserting_before(values):
            insert_call(values, kv_write._opoverload, arguments)
        for node in (keys, values):
            node.replace_all_uses_with(node.args[0])
            exported.graph.erase_node(node)
    exported.graph_module.recompile()


def _where(write: Node) -> tuple[Node, Any] | None:
    """Lengths and first key of the `Pass` whose `slots` a write goes to, None for another write."""
    slots = _argument(write.args[1][2], aten.unsqueeze.default)  # type: ignore[index]
    if slots is None or slots.target != aten.add.Tensor:
        return None
    rows, own = slots.args
    lengths = _argument(rows, aten.unsqueeze.default)
    counted = _argument(own, aten.add.Tensor)
    return None if lengths is None or counted is None else (lengths, own.args[1])


def _argument(node: Any, target: Any) -> Any:
    """The first argument of a call of an op, None for another one."""
    return node.args[0] if isinstance(node, Node) and node.target == target else None
