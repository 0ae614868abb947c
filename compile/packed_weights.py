"""Packs the weights of linear layers in exported programs, before they are compiled for a CPU: see `kernels.linear`."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Node

from ..kernels.expert_linear.op import expert_linear
from ..kernels.linear.packing import OUTPUTS, STEPS
from ..kernels.native import load_library
from .precision import Form, Precision, plain
from .rewrites import insert_call
from .writer import identity

STORED = (InputKind.PARAMETER, InputKind.BUFFER)
Turn = Callable[[Tensor], Tensor]  # from a stored tensor to a weight [..., N, K]
Key = tuple[Any, ...]  # of a tensor, or of several that are packed together


def as_is(weight: Tensor) -> Tensor:
    return weight


def turned(weight: Tensor) -> Tensor:
    return weight.transpose(-1, -2)


class Packed(NamedTuple):
    """A packed weight, one of several layers perhaps. kind: what its elements are, as `Form` names it."""

    name: str
    kind: str
    tensor: Tensor


def pack_weights(exported: Collection[ExportedProgram], precision: Precision = plain) -> list[Packed]:
    """Replace linear layers over stored weights by `specstep::packed_linear` over packed ones, in place, and say what
    was packed.

    A layer is replaced when x and weight are both bfloat16 or both float32; `precision` says what its weight becomes.
    Layers that read the same x become one, with slices of its output, where they do in every program and their weights
    are of one kind. An embedding whose weight is also a linear's, or becomes int8, becomes
    `specstep::packed_embedding`, experts' layers become `specstep::packed_expert_linear`. An `addmm` over a stored
    weight [K, N], as GPT-2 has them, is a layer, too. A router, which has an output for each expert, keeps its dtype.
    A weight of several programs is packed once. A plain weight that nothing else uses is gone.
    """
    load_library()
    packed = _Packed(precision)
    programs = [_Program(program, packed) for program in exported]
    linears = [_runs(program) for program in programs]
    embedded = {program.key(node.args[0]) for program in programs for node in program.embeddings()}
    partners: dict[Key, set[Key]] = defaultdict(set)
    for program, runs in zip(programs, linears, strict=True):
        for run in runs:
            for key in _weights(program, run):
                partners[key].add(_weights(program, run))
    for program, runs in zip(programs, linears, strict=True):
        for run in runs:
            keys = _weights(program, run)
            together = all(partners[key] == {keys} and key not in embedded for key in keys)
            for layers in [run] if together else [[layer] for layer in run]:
                _replace_linears(program, layers)
        for node in program.embeddings():
            if program.key(node.args[0]) in partners or program.form(node.args[0]).kind == "int8":
                _replace_embedding(program, node)
        for node in program.calls(expert_linear._opoverload):
            _replace_experts(program, node)
        for node in program.calls(torch.ops.aten.addmm.default, first=1):
            _replace_addmm(program, node)
        program.drop_unused()
    return list(packed.made.values())


class _Packed:
    """Packed tensors, each made once for all programs."""

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.forms: dict[Key, Form] = {}
        self.made: dict[Key, Packed] = {}

    def form(self, weight: Tensor) -> Form:
        """What a weight [..., N, K] becomes."""
        key = identity(weight)
        if key not in self.forms:
            self.forms[key] = self.precision(weight)
        return self.forms[key]

    def of(self, name: str, weights: Sequence[Tensor], form: Form) -> Packed:
        """These tensors, joined along their first dimension and brought to a form, under a name made from `name`."""
        key = tuple(identity(weight) for weight in weights)
        if key not in self.made:
            name, taken = f"{name}_packed", {other.name for other in self.made.values()}
            while name in taken:  # by another tensor, of another program
                name += "_"
            made = form.make(torch.cat(list(weights)) if len(weights) > 1 else weights[0])
            self.made[key] = Packed(name, form.kind, made)
        return self.made[key]


class _Program:
    """An exported program with its stored tensors."""

    def __init__(self, exported: ExportedProgram, packed: _Packed):
        self.packed_tensors = packed
        self.exported, self.graph = exported, exported.graph_module.graph
        specs = [spec for spec in exported.graph_signature.input_specs if spec.kind in STORED]
        names = {spec.arg.name: spec.target for spec in specs}
        self.stored = {node: names[node.name] for node in self.graph.find_nodes(op="placeholder") if node.name in names}
        self.replaced: set[Node] = set()  # plain weights
        self.added: dict[str, Node] = {}
        experts = self.graph.find_nodes(op="call_function", target=expert_linear._opoverload)
        self.routed = {node.args[1].meta["val"].shape[0] for node in experts}  # counts of experts

    def calls(self, target: Any, first: int = 0) -> Iterator[Node]:
        """Calls of an op whose arguments from `first` on are an x and a stored tensor of its dtype; on the CPU."""
        for node in self.graph.find_nodes(op="call_function", target=target):
            pair = node.args[first : first + 2]
            x, weight = (argument.meta["val"] for argument in pair)
            if pair[1] in self.stored and x.dtype == weight.dtype and weight.dtype in STEPS and _on_cpu(x, weight):
                yield node

    def embeddings(self) -> Iterator[Node]:
        """Calls of `aten.embedding` over a stored tensor, by ids of int64; on the CPU."""
        for node in self.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default):
            weight, ids = (argument.meta["val"] for argument in node.args[:2])
            if node.args[0] in self.stored and ids.dtype == torch.int64 and _on_cpu(weight, ids):
                yield node

    def tensor(self, node: Any) -> Tensor:
        """The stored tensor behind a placeholder."""
        return self.exported.state_dict[self.stored[node]].detach()

    def key(self, node: Any) -> Key:
        return identity(self.tensor(node))

    def form(self, node: Any, turn: Turn = as_is) -> Form:
        """What a stored weight becomes once it is turned."""
        weight = turn(self.tensor(node))
        routes = weight.dim() == 2 and len(weight) in self.routed
        form = plain(weight) if routes else self.packed_tensors.form(weight)
        return Form(form.kind, lambda weight: form.make(turn(weight)))

    def packed(self, nodes: Sequence[Any], form: Form) -> Node:
        """The placeholder of these stored tensors in a form, joined. They are used no more."""
        self.replaced |= set(nodes)
        made = self.packed_tensors.of(self.stored[nodes[0]], [self.tensor(node) for node in nodes], form)
        if made.name not in self.added:
            self.added[made.name] = self._add(made.name, made.tensor)
        return self.added[made.name]

    def _add(self, name: str, tensor: Tensor) -> Node:
        specs = self.exported.graph_signature.input_specs
        place = next(index for index, spec in enumerate(specs) if spec.kind not in STORED)
        nodes = self.graph.find_nodes(op="placeholder")
        mode = detect_fake_mode([node.meta.get("val") for node in nodes])
        assert mode is not None
        with self.graph.inserting_before(nodes[place]):
            new = self.graph.placeholder(name.replace(".", "_"))
        new.meta["val"] = mode.from_tensor(tensor, static_shapes=True)
        specs.insert(place, InputSpec(InputKind.BUFFER, TensorArgument(name=new.name), name, persistent=True))
        self.exported.state_dict[name] = tensor
        return new

    def replace(self, node: Node, new: Node) -> None:
        """Have all that uses a node use another, and erase it."""
        node.replace_all_uses_with(new)
        self.exported.graph_signature.replace_all_uses(node.name, new.name)
        self.graph.erase_node(node)

    def drop_unused(self) -> None:
        """Erase plain weights that have no other use."""
        specs, held = self.exported.graph_signature.input_specs, self.exported.state_dict
        unused = {node for node in self.replaced if not node.users}
        keys, names = {self.key(node) for node in unused}, {node.name for node in unused}
        specs[:] = [spec for spec in specs if spec.arg.name not in names]
        for node in unused:
            self.graph.erase_node(node)
        targets = {spec.target for spec in specs}
        for name in [name for name, tensor in held.items() if name not in targets and identity(tensor) in keys]:
            del held[name]
        self.exported.graph_module.recompile()


def _on_cpu(*tensors: Tensor) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors)


def _weights(program: _Program, run: Sequence[Node]) -> Key:
    return tuple(program.key(node.args[1]) for node in run)


def _runs(program: _Program) -> list[list[Node]]:
    """The linear layers to replace, in runs that can be one layer: of the same x, different weights of whole panels but
    for the last, and biases that are all stored or all absent."""
    runs: list[list[Node]] = []
    last: dict[Any, list[Node]] = {}  # of each x
    for node in program.calls(torch.ops.aten.linear.default):
        run = last.get(node.args[0])
        if run is None or not _joins(program, run, node):
            run = last[node.args[0]] = []
            runs.append(run)
        run.append(node)
    return runs


def _joins(program: _Program, run: list[Node], node: Node) -> bool:
    biases = [_bias(layer) for layer in (*run, node)]
    return (
        _columns(run[-1]) % OUTPUTS == 0
        and program.key(node.args[1]) not in _weights(program, run)
        and program.form(node.args[1]).kind == program.form(run[-1].args[1]).kind
        and (all(bias is None for bias in biases) or all(bias in program.stored for bias in biases))
    )


def _bias(layer: Node) -> Any:
    return layer.args[2] if len(layer.args) > 2 else None


def _columns(layer: Node) -> int:
    return int(layer.meta["val"].shape[-1])


def _replace_linears(program: _Program, layers: list[Node]) -> None:
    """One product for all layers, which read the same x, and a slice of it for each."""
    columns = [_columns(layer) for layer in layers]
    bias = _bias(layers[0])
    if len(layers) > 1 and bias is not None:
        biases = [_bias(layer) for layer in layers]
        bias = program.packed(biases, Form(str(biases[0].meta["val"].dtype).removeprefix("torch."), torch.clone))
    weight = program.packed([layer.args[1] for layer in layers], program.form(layers[0].args[1]))
    op, axis = torch.ops.specstep.packed_linear.default, layers[0].meta["val"].dim() - 1
    ends = list(accumulate(columns))
    with program.graph.inserting_before(layers[0]):
        new = [insert_call(layers[0], op, (layers[0].args[0], weight, bias, ends[-1]))]
        if len(layers) > 1:
            parts = zip(layers, [0, *ends], ends, strict=False)
            new = [insert_call(node, torch.ops.aten.slice.Tensor, (new[0], axis, *part)) for node, *part in parts]
    for layer, own in zip(layers, new, strict=True):
        program.replace(layer, own)


def _replace_embedding(program: _Program, node: Node) -> None:
    weight = program.packed([node.args[0]], program.form(node.args[0]))
    columns, depth = program.tensor(node.args[0]).shape
    op = torch.ops.specstep.packed_embedding.default
    with program.graph.inserting_before(node):
        program.replace(node, insert_call(node, op, (weight, node.args[1], columns, depth)))


def _replace_experts(program: _Program, node: Node) -> None:
    x, weight, experts, transposed = node.args
    packed = program.packed([weight], program.form(weight, turned if transposed else as_is))
    op = torch.ops.specstep.packed_expert_linear.default
    with program.graph.inserting_before(node):
        program.replace(node, insert_call(node, op, (x, packed, experts, _columns(node))))


def _replace_addmm(program: _Program, node: Node) -> None:
    bias, x, weight = node.args
    if bias not in program.stored or bias.meta["val"].dim() != 1 or node.kwargs:  # type: ignore[union-attr]
        return
    packed = program.packed([weight], program.form(weight, turned))
    op = torch.ops.specstep.packed_linear.default
    with program.graph.inserting_before(node):
        program.replace(node, insert_call(node, op, (x, packed, bias, _columns(node))))
