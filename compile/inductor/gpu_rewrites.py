"""Rewrites of exported programs before they are compiled for a GPU, where each launch costs a few microseconds: one
product for layers that read the same x, and cache writes that the compiler fuses with what computes keys and values."""

from collections.abc import Collection, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ...kernels.fp8_linear.op import fp8_linear
from ...kernels.kv_write.op import kv_write
from ..graph_edits import insert_call
from ..precision import FP8, Precision
from .packed_weights import OpCall, joined_layers, replace_layers
from .stored_program import COPIED, FP8_SCALED, Packed, PackedTensors, StoredProgram

MOST_COUNTED = 1024  # elements of a row, each compared with all: a million comparisons take a few microseconds
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
aten = torch.ops.aten


def join_layers(exported: Collection[ExportedProgram], precision: Precision) -> list[Packed]:
    """Linear layers of one x become one layer and slices of its output, where they do in every program; those whose
    weights `precision` makes float8 become `specstep::fp8_linear`. A weight of several programs is made once; one that
    nothing else uses is gone."""
    packed = PackedTensors(precision)
    programs = [StoredProgram(program, packed, "cuda", DTYPES) for program in exported]
    for program, runs in zip(programs, joined_layers(programs, outputs=1), strict=True):
        for layers in runs:
            if program.kind(layers[0].args[1]) == FP8:
                replace_layers(program, layers, partial(_fp8_linear, program, layers))
            elif len(layers) > 1:
                replace_layers(program, layers, _linear, COPIED)
        program.drop_unused()
    return list(packed.made.values())


def _linear(x: Node, weight: Node, bias: Any, columns: int) -> OpCall:
    return aten.linear.default, (x, weight, bias)


def _fp8_linear(
    program: StoredProgram, layers: Sequence[Node], x: Node, weight: Node, bias: Any, columns: int
) -> OpCall:
    scales = program.packed([layer.args[1] for layer in layers], FP8_SCALED)
    return fp8_linear._opoverload, (x, weight, scales, bias)


def join_writes(exported: ExportedProgram) -> None:
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


def count_ranks(exported: ExportedProgram) -> None:
    """`topk` of integers, of which the indices alone are used: an element's rank is the number of those ahead of it,
    the greater ones and equal ones of a lower index. PyTorch's selection and its sort take 14 microseconds on an H200
    however few there are; comparisons fuse with what computes the integers."""
    for node in exported.graph.find_nodes(op="call_function", target=aten.topk.default):
        key, k, *rest = node.args
        value, used = key.meta["val"], [user for user in node.users if user.users]
        few = isinstance(value.shape[-1], int) and value.shape[-1] <= MOST_COUNTED and rest in ([], [-1])
        if value.dtype != torch.int64 or not few or any(user.args[1] != 1 for user in used):
            continue
        with exported.graph.inserting_before(node):
            counted = _indices_of_largest(node, key, k, value.shape[-1], value.device)
        for user in list(node.users):
            user.replace_all_uses_with(counted)
            exported.graph.erase_node(user)
        exported.graph.erase_node(node)


def _indices_of_largest(place: Node, key: Node, k: int, count: int, device: torch.device) -> Node:
    """Indices [..., k] of the largest of key [..., count], as calls ahead of `place`."""

    def call(op: Any, *arguments: Any) -> Node:
        return insert_call(place, op, arguments)

    def numbers(end: int) -> Node:
        made = place.graph.call_function(aten.arange.default, (end,), {"device": device, "pin_memory": False})
        made.meta = {**place.meta, "val": key.meta["val"].new_empty(end)}
        return made

    index = numbers(count)
    this, other = call(aten.unsqueeze.default, key, -1), call(aten.unsqueeze.default, key, -2)
    earlier = call(aten.lt.Tensor, call(aten.unsqueeze.default, index, -2), call(aten.unsqueeze.default, index, -1))
    tied = call(aten.logical_and.default, call(aten.eq.Tensor, other, this), earlier)
    ahead = call(aten.logical_or.default, call(aten.gt.Tensor, other, this), tied)
    rank = call(aten.sum.dim_IntList, ahead, [-1])
    taken = call(aten.unsqueeze.default, numbers(k), -1)
    found = call(aten.eq.Tensor, call(aten.unsqueeze.default, rank, -2), taken)  # [..., k, count]
    # One of each row is found. Where kernels are timed, on numbers that are no ranks, several may be: a sum of their
    # indices would be none, and a GPU refuses to read at such a one.
    return call(aten.amax.default, call(aten.mul.Tensor, found, index), [-1])
