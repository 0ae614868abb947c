"""Packs the weights of linear layers in exported programs, before they are compiled for a CPU: see `kernels.linear`."""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ...kernels.expert_linear.op import expert_linear
from ...kernels.linear.groups import GROUP_KINDS
from ...kernels.linear.packing import OUTPUTS, STEPS
from ...kernels.native import load_library
from ..graph_edits import insert_call
from ..precision import Precision, plain
from .stored_program import COPIED, Packed, PackedTensors, StoredProgram, WeightKey

OpCall = tuple[Any, tuple[Any, ...]]  # an op and its arguments


def pack_weights(exported: Collection[ExportedProgram], precision: Precision = plain) -> list[Packed]:
    """Replace linear layers over stored weights by `specstep::packed_linear` over packed ones, in place, and say what
    was packed.

    A layer is replaced when x and weight are both bfloat16 or both float32; `precision` says what its weight becomes.
    Layers that read the same x become one, with slices of its output, where they do in every program and their weights
    are of one kind. An embedding whose weight is also a linear's, or is in groups, becomes
    `specstep::packed_embedding`, experts' layers become `specstep::packed_expert_linear`. An `addmm` over a stored
    weight [K, N], as GPT-2 has them, is a layer, too. A router, which has an output for each expert, keeps its dtype.
    A weight of several programs is packed once. A plain weight that nothing else uses is gone.
    """
    load_library()
    packed = PackedTensors(precision)
    programs = [StoredProgram(program, packed, "cpu", STEPS) for program in exported]
    linears = joined_layers(programs)
    held: set[Any] = set()
    for program, runs in zip(programs, linears, strict=True):
        held.update(key for run in runs for key in _weights(program, run))
    for program, runs in zip(programs, linears, strict=True):
        for layers in runs:
            replace_layers(program, layers, _packed_linear)
        for node in program.embeddings():
            if program.key(node.args[0]) in held or program.kind(node.args[0]) in GROUP_KINDS:
                _replace_embedding(program, node)
        for node in program.calls(expert_linear._opoverload):
            _replace_experts(program, node)
        for node in program.calls(torch.ops.aten.addmm.default, first=1):
            _replace_addmm(program, node)
        program.drop_unused()
    return list(packed.made.values())


def joined_layers(programs: Sequence[StoredProgram], outputs: int = OUTPUTS) -> list[list[list[Node]]]:
    """The linear layers of each program: those in one list can be one layer, and are in every program. outputs: the
    weights that are joined have a multiple of them, but for the last."""
    linears = [_runs(program, outputs) for program in programs]
    embedded = {program.key(node.args[0]) for program in programs for node in program.embeddings()}
    partners: dict[WeightKey, set[WeightKey]] = defaultdict(set)
    for program, runs in zip(programs, linears, strict=True):
        for run in runs:
            for key in _weights(program, run):
                partners[key].add(_weights(program, run))

    def together(program: StoredProgram, run: list[Node]) -> bool:
        keys = _weights(program, run)
        return all(partners[key] == {keys} and key not in embedded for key in keys)

    return [
        [layers for run in runs for layers in ([run] if together(program, run) else [[layer] for layer in run])]
        for program, runs in zip(programs, linears, strict=True)
    ]


def _weights(program: StoredProgram, run: Sequence[Node]) -> WeightKey:
    return tuple(program.key(node.args[1]) for node in run)


def _runs(program: StoredProgram, outputs: int) -> list[list[Node]]:
    """The linear layers to replace, in runs that can be one layer: of the same x, different weights, and biases that
    are all stored or all absent."""
    runs: list[list[Node]] = []
    last: dict[Any, list[Node]] = {}  # of each x
    for node in program.calls(torch.ops.aten.linear.default):
        run = last.get(node.args[0])
        if run is None or _columns(run[-1]) % outputs or not _joins(program, run, node):
            run = last[node.args[0]] = []
            runs.append(run)
        run.append(node)
    return runs


def _joins(program: StoredProgram, run: list[Node], node: Node) -> bool:
    biases = [_bias(layer) for layer in (*run, node)]
    return (
        program.key(node.args[1]) not in _weights(program, run)
        and program.kind(node.args[1]) == program.kind(run[-1].args[1])
        and (all(bias is None for bias in biases) or all(bias in program.stored for bias in biases))
    )


def _bias(layer: Node) -> Any:
    return layer.args[2] if len(layer.args) > 2 else None


def _columns(layer: Node) -> int:
    return int(layer.meta["val"].shape[-1])


def _packed_linear(x: Node, weight: Node, bias: Any, columns: int) -> OpCall:
    return torch.ops.specstep.packed_linear.default, (x, weight, bias, columns)


def replace_layers(
    program: StoredProgram, layers: list[Node], linear: Callable[..., OpCall], rule: str | None = None
) -> None:
    """One product for all layers, which read the same x, and a slice of it for each. linear: x, weight, bias and the
    number of outputs -> the call that gives them. rule: see `StoredProgram.recipe`."""
    columns = [_columns(layer) for layer in layers]
    bias = _bias(layers[0])
    if len(layers) > 1 and bias is not None:
        bias = program.packed([_bias(layer) for layer in layers], COPIED)
    weight, axis = program.packed([layer.args[1] for layer in layers], rule), layers[0].meta["val"].dim() - 1
    ends = list(accumulate(columns))
    with program.graph.inserting_before(layers[0]):
        new = [insert_call(layers[0], *linear(layers[0].args[0], weight, bias, ends[-1]))]
        if len(layers) > 1:
            parts = zip(layers, [0, *ends], ends, strict=False)
            new = [insert_call(node, torch.ops.aten.slice.Tensor, (new[0], axis, *part)) for node, *part in parts]
    for layer, own in zip(layers, new, strict=True):
        program.replace(layer, own)


def _replace_embedding(program: StoredProgram, node: Node) -> None:
    weight = program.packed([node.args[0]])
    columns, depth = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    op = torch.ops.specstep.packed_embedding.default
    with program.graph.inserting_before(node):
        program.replace(node, insert_call(node, op, (weight, node.args[1], columns, depth)))


def _replace_experts(program: StoredProgram, node: Node) -> None:
    x, weight, experts, transposed = node.args
    packed = program.packed([weight], turned=bool(transposed))
    op = torch.ops.specstep.packed_expert_linear.default
    with program.graph.inserting_before(node):
        program.replace(node, insert_call(node, op, (x, packed, experts, _columns(node))))


def _replace_addmm(program: StoredProgram, node: Node) -> None:
    bias, x, weight = node.args
    if bias not in program.stored or bias.meta["val"].dim() != 1 or node.kwargs:  # type: ignore[union-attr]
        return
    packed = program.packed([weight], turned=True)
    op = torch.ops.specstep.packed_linear.default
    with program.graph.inserting_before(node):
        program.replace(node, insert_call(node, op, (x, packed, bias, _columns(node))))
