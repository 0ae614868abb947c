"""Finds layers that are alike in an exported graph, and puts one op in the place of each: a kind of layer is compiled
once, however many layers there are."""

import operator
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from ..graph_edits import base_of, written_arguments
from .layer_ops import NAMESPACE, LayerKind, define_op

LEAST = 3  # layers of a kind that are worth a function of their own
NUMBERED = re.compile(r"^(.*?\.\d+)(?:\.|$)")  # the outermost module of a list, in a module's name


class _Opaque(Exception):
    """A layer that cannot be an op of its own."""


class _Layer:
    """A run of nodes of one module. inputs: what they read from outside; outputs: what is read outside."""

    def __init__(self, nodes: Sequence[Node]):
        """Raises _Opaque."""
        self.nodes = nodes
        self.inside = {node: index for index, node in enumerate(nodes)}
        self.inputs: dict[Node, int] = {}
        self.written: set[int] = set()
        self.text = "\n".join(self._describe(node) for node in nodes)
        self._find_written()
        self.outputs = [node for node in nodes if any(user not in self.inside for user in node.users)]
        for node in self.outputs:
            self._check_output(node)
        self.text += f"\n{[self.inside[node] for node in self.outputs]} {sorted(self.written)}"
        self.text += "".join(f"\n{_kind(node.meta['val'])}" for node in self.inputs)

    def _describe(self, node: Node) -> str:
        """What a node computes, in the same words for each layer of a kind."""
        if node.op != "call_function":
            raise _Opaque
        value = torch.utils._pytree.tree_map_only(Tensor, _kind, node.meta.get("val"))
        given = torch.fx.node.map_arg((node.args, node.kwargs), self._name)
        return f"{node.target} {given} {value}"

    def _name(self, node: Node) -> Any:
        if node in self.inside:
            return _Word(f"n{self.inside[node]}")
        value = node.meta.get("val")
        if isinstance(value, SymInt):
            return _Word(f"size {value}")
        if not isinstance(value, Tensor) or node.op == "get_attr":
            raise _Opaque
        return _Word(f"x{self.inputs.setdefault(node, len(self.inputs))}")

    def _find_written(self) -> None:
        for node in self.nodes:
            for value in written_arguments(node):
                base = base_of(value)
                if base in self.inputs:
                    if base.op != "placeholder":  # a view; its base would be copied
                        raise _Opaque
                    self.written.add(self.inputs[base])
                elif base not in self.inside:
                    raise _Opaque
        for node, index in self.inputs.items():  # a view of what is written, made before
            if index not in self.written and self.inputs.get(base_of(node), index) in self.written:
                raise _Opaque

    def _check_output(self, node: Node) -> None:
        value, source = node.meta.get("val"), node
        returned = any(user.op == "output" for user in node.users)  # by its name
        if returned or not isinstance(value, Tensor) or not value.is_contiguous():
            raise _Opaque
        if node.target is operator.getitem:
            source = node.args[0]  # type: ignore[assignment]
        schema = getattr(source.target, "_schema", None)
        if schema is None or any(returned.alias_info is not None for returned in schema.returns):
            raise _Opaque
        for size in value.shape:
            self.size_of(size)

    def writes(self, tensors: Collection[Node]) -> bool:
        """Whether it writes to one of these tensors from outside."""
        return any(index in self.written and node in tensors for node, index in self.inputs.items())

    def size_of(self, size: int | SymInt) -> int | tuple[int, int]:
        """A size as a number, or as (input, dimension) that has it. Raises _Opaque."""
        if isinstance(size, int):
            return size
        for node, index in self.inputs.items():
            for dimension, other in enumerate(node.meta["val"].shape):
                if str(other) == str(size):
                    return index, dimension
        raise _Opaque


class _Word(str):
    """Text that is written as it is."""

    __slots__ = ()
    __repr__ = str.__str__


def outline_layers(program: ExportedProgram, takes: Callable[[LayerKind], bool]) -> list[LayerKind]:
    """Replace the layers of each kind, of which there are at least LEAST, by calls of one op, in place -> the kinds.
    takes: whether a kind can be one."""
    graph = program.graph
    _read_what_was_written(graph)
    taken = [(kind, layers) for kind, layers in _alone(graph, _kinds(graph)) if takes(kind)]
    found = _alone(graph, taken)  # those that are not write their caches themselves
    called: dict[Node, Node] = {}
    for kind, layers in found:
        for layer in layers:
            _replace(graph, layer, kind, called)
    return [kind for kind, _ in found]


def _kinds(graph: Graph) -> list[tuple[LayerKind, list[_Layer]]]:
    """The kinds of which there are enough layers, and these."""
    alike: dict[str, list[_Layer]] = defaultdict(list)
    for nodes in _runs(graph):
        with suppress(_Opaque):
            layer = _Layer(nodes)
            alike[layer.text].append(layer)
    kinds = []
    for layers in alike.values():
        if len(layers) >= LEAST:
            with suppress(_Opaque):
                kinds.append((_make_kind(layers[0]), layers))
    return kinds


def _alone(graph: Graph, kinds: list[tuple[LayerKind, list[_Layer]]]) -> list[tuple[LayerKind, list[_Layer]]]:
    """The kinds whose layers write to caches that only ops of ours write to besides. Any other write gives a cache
    other strides, which the code of a layer does not know."""
    others = [node for node in graph.nodes if getattr(node.target, "namespace", None) != NAMESPACE]
    while True:
        inside = {node for _, layers in kinds for layer in layers for node in layer.nodes}
        outside = {base_of(value) for node in others if node not in inside for value in written_arguments(node)}
        kept = [(kind, layers) for kind, layers in kinds if not any(layer.writes(outside) for layer in layers)]
        if len(kept) == len(kinds):
            return kinds
        kinds = kept


def _runs(graph: Graph) -> list[list[Node]]:
    """Neighbours that belong to one numbered module; nodes of no module belong to the one before."""
    runs: list[list[Node]] = []
    last = None
    for node in graph.nodes:
        if node.op == "placeholder" or node.op == "output":
            last = None
            continue
        stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        found = NUMBERED.match(stack[-1]) if stack else None
        key = (found[1] if found else None) if stack else last
        if key is not None:
            if key != last:
                runs.append([])
            runs[-1].append(node)
        last = key
    return runs


def _read_what_was_written(graph: Graph) -> None:
    """Have nodes read a tensor itself, not what a write in place to it returns, which is the same."""
    for node in graph.nodes:
        written = written_arguments(node)
        schema: Any = getattr(node.target, "_schema", None)
        if len(written) == 1 and len(schema.returns) == 1 and schema.returns[0].alias_info is not None:
            node.replace_all_uses_with(written[0], lambda user: user.op != "output")


def _kind(value: Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)} {value.stride()}"


def _make_kind(layer: _Layer) -> LayerKind:
    """The op of a layer, known to torch. Raises _Opaque."""
    graph, copies = Graph(), {}
    for node, index in layer.inputs.items():
        copies[node] = graph.placeholder(f"x{index}")
        copies[node].meta["val"] = node.meta["val"]
    inputs = list(copies.values())

    def copied(node: Node) -> Node:
        if node not in copies:  # a size from outside
            size = layer.size_of(node.meta["val"])
            assert isinstance(size, tuple)
            copies[node] = graph.call_function(torch.ops.aten.sym_size.int, (inputs[size[0]], size[1]))
            copies[node].meta["val"] = node.meta["val"]
        return copies[node]

    for node in layer.nodes:
        for source in node.all_input_nodes:
            copied(source)
        copies[node] = graph.node_copy(node, copied)
    graph.output(tuple(copies[node] for node in layer.outputs))
    sizes = [([layer.size_of(size) for size in node.meta["val"].shape], node.meta["val"]) for node in layer.outputs]

    def fake(*given: Tensor) -> Tensor | tuple[Tensor, ...] | None:
        made = tuple(
            value.new_empty([given[size[0]].shape[size[1]] if isinstance(size, tuple) else size for size in shape])
            for shape, value in sizes
        )
        return made if len(made) > 1 else made[0] if made else None

    writes = [index in layer.written for index in layer.inputs.values()]
    given = [f"Tensor{f'(a{index}!)' if write else ''} x{index}" for index, write in enumerate(writes)]
    count = len(layer.outputs)
    return LayerKind(define_op("layer", given, count, fake), GraphModule({}, graph), count, fake)


def _replace(graph: Graph, layer: _Layer, kind: LayerKind, called: dict[Node, Node]) -> None:
    """Put a call of a layer's kind in its place. called: what stands for nodes of layers that were replaced."""
    first, last = layer.nodes[0], layer.nodes[-1]
    with graph.inserting_before(first):
        call = graph.call_function(kind.overload, tuple(called.get(node, node) for node in layer.inputs))
        values = tuple(node.meta["val"] for node in layer.outputs)
        call.meta = {"val": values if len(values) != 1 else values[0], "nn_module_stack": last.meta["nn_module_stack"]}
        for index, node in enumerate(layer.outputs):
            result = call
            if len(values) > 1:
                result = graph.call_function(operator.getitem, (call, index))
                result.meta = {"val": values[index]}
            called[node] = result
            node.replace_all_uses_with(result, lambda user: user not in layer.inside)
    for node in reversed(layer.nodes):
        graph.erase_node(node)
