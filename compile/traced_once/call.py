"""One call of a layer: what it reads, what it adds to the graph, and what it leaves to those behind it."""

import re
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_slot

from ...graphs.attention import Write
from ...graphs.hybrid_cache import names_of_layer
from ..graph_edits import base_of, written_arguments
from .alike import PLAIN, Opaque, describe_tensor
from .given import Given

SIZES = {getattr(torch.ops.aten, name) for name in ("sym_size", "sym_stride", "sym_numel", "sym_storage_offset")}
VARIES = re.compile(r"\b[su]\d+\b")
ILLEGAL = re.compile(r"\W+")  # in a node's name


class Call:
    """A call that begins. given: what it may read; path: the layer's in the program. nodes: those of the given tensors,
    as they are now."""

    def __init__(self, tracer: Any, given: Given, number: int, path: str):
        """Raises Opaque."""
        self.tracer, self.given, self.number, self.path = tracer, given, number, path
        self.tensors = list(given.tensors.values())
        self.nodes = [node_of(tensor, tracer) for tensor in self.tensors]
        self.last = next(iter(reversed(tracer.graph.nodes)))
        self.called = self.calls()
        self.left = [(len(where.writes), dict(where.earlier)) for where in given.passes]
        described = "\n".join(f"{name} {describe_tensor(tensor)}" for name, tensor in given.tensors.items())
        vary = dict.fromkeys(VARIES.findall(described))
        self.sizes = {name: f"size {index}" for index, name in enumerate(vary)}  # names of sizes that vary
        tensors = self._same_sizes(described)
        self.kind = f"{given.text}\n{tensors}\n{self._aliases()}\n{sorted(self.called.items())}"

    def _aliases(self) -> list[int]:
        """For each tensor the first that is the same."""
        first: dict[Node, int] = {}
        return [first.setdefault(node, index) for index, node in enumerate(self.nodes)]

    def describe(self, value: Any) -> str:
        """A tensor or a size in the same words for each call of a kind: sizes of caches may have names of their own,
        until the whole program is known."""
        return self._same_sizes(describe_tensor(value) if isinstance(value, Tensor) else str(value))

    def _same_sizes(self, text: str) -> str:
        return VARIES.sub(lambda found: self.sizes.get(found[0], found[0]), text)

    def within(self, name: str) -> str | None:
        """The name of a module, or a key of it, as the layer itself has it; None for those outside."""
        rest = name.removeprefix(self.path)
        return rest if rest != name and rest[:1] in ("", ".", "@") else None

    def calls(self) -> dict[str, int]:
        """How often each module of the layer was called so far."""
        counts = ((self.within(name), count) for name, count in self.tracer.num_calls.items())
        return {name: count for name, count in counts if name is not None}

    def new_writes(self) -> list[list[Write]]:
        """The writes that the layer has left to each pass since it began."""
        return [where.writes[writes:] for where, (writes, _) in zip(self.given.passes, self.left, strict=True)]

    def new_tensors(self) -> list[dict[str, Tensor]]:
        """What it has left to each for later passes, by names without the layer's number. Raises Opaque."""
        left = []
        for where, (_, earlier) in zip(self.given.passes, self.left, strict=True):
            new = [name for name, tensor in where.earlier.items() if earlier.get(name) is not tensor]
            own = names_of_layer(new, self.number)
            if len(own) != len(new):
                raise Opaque
            left.append({own[name]: where.earlier[name] for name in new})
        return left


class Traced:
    """A call that has ended. nodes: what it added to the graph; outcome: what it returned, and left to passes. text:
    the same for calls that can stand for each other."""

    def __init__(self, call: Call, result: Any):
        """Raises Opaque for what cannot be repeated."""
        writes = call.new_writes()
        self.functions = [[write.function for write in each] for each in writes]
        self.call, self.outcome = (
            call,
            (result, [[write.tensors for write in each] for each in writes], call.new_tensors()),
        )
        nodes = takewhile(lambda node: node is not call.last, reversed(call.tracer.graph.nodes))
        self.nodes = list(nodes)[::-1]
        self.inside = {node: index for index, node in enumerate(self.nodes)}
        self.roles = {node: index for index, node in reversed([*enumerate(call.nodes)])}
        self.places: dict[int, Node] = {}
        map_tensors((self.outcome, call.tensors), self._place)
        self.calls = {name: count - call.called.get(name, 0) for name, count in call.calls().items()}
        self._check_writes()
        outcome = map_tensors((self.outcome, call.tensors), lambda x: Word(self._word(self.places[id(x)])))
        self.text = "\n".join(
            [*map(self._describe, self.nodes), f"{outcome} {self.functions} {sorted(self.calls.items())}"]
        )

    def leaks(self) -> bool:
        """Whether something of it is read behind it that is not in the outcome. Sizes are the same wherever they are
        read."""
        left = set(self.places.values())
        hidden = (node for node in self.nodes if node not in left and not isinstance(node.meta.get("val"), SymInt))
        readers = (user for node in hidden for user in node.users if user not in self.inside)
        return any(packet_of(user) not in SIZES for user in readers)

    def _place(self, tensor: Tensor) -> None:
        self.places[id(tensor)] = node_of(tensor, self.call.tracer)

    def _check_writes(self) -> None:
        own = {base_of(node) for node in self.call.nodes}
        for node in self.nodes:
            if node.op != "call_function" or node.meta.get("unbacked_bindings"):
                raise Opaque
            if any(base_of(value) not in self.inside.keys() | own for value in written_arguments(node)):
                raise Opaque

    def _describe(self, node: Node) -> str:
        """What a node computes and where, in the same words for each layer of a kind."""
        given = torch.fx.node.map_arg((node.args, node.kwargs), lambda x: Word(self._word(x)))
        given = given if packet_of(node) not in SIZES else ((), {})  # of any tensor that has it
        value = torch.utils._pytree.tree_map(self.call.describe, node.meta.get("val"))
        stack = [(*map(self._here, (key, name)), kind) for key, (name, kind) in node.meta["nn_module_stack"].items()]
        names = f"{node.target} {id(node.target)} {base_name(node)}"
        return f"{names} {given} {value} {stack} {node.meta.get('stack_trace')}"

    def _here(self, name: str) -> str:
        within = self.call.within(name)
        return name if within is None else f"HERE{within}"

    def _word(self, node: Node) -> str:
        if node in self.inside:
            return f"n{self.inside[node]}"
        if node in self.roles:
            return f"x{self.roles[node]}"
        value = node.meta.get("val")  # one size may be read in many places
        return f"({self.call.describe(value)})" if isinstance(value, SymInt) else node.name


class Word(str):
    """Text that is written as it is."""

    __slots__ = ()
    __repr__ = str.__str__


def node_of(tensor: Tensor, tracer: Any) -> Node:
    """What a tensor is in the graph. Raises Opaque."""
    tracked = get_proxy_slot(tensor, tracer, None)
    if tracked is None or tracked.constant is not None:
        raise Opaque
    node: Node = tracked.proxy.node
    return node


def packet_of(node: Node) -> Any:
    """The operator that a node calls, whatever its overload; None for a function."""
    return getattr(node.target, "overloadpacket", None)


def base_name(node: Node) -> str:
    """The name that the tracer asked for, to which the graph appended a number."""
    targets = node.target, getattr(packet_of(node), "__name__", None)
    asked = [ILLEGAL.sub("_", node.graph._target_to_str(target)) for target in targets if target is not None]
    fitting = [name for name in asked if node.name.removeprefix(name).removeprefix("_").isdigit() or node.name == name]
    if not fitting:
        raise Opaque
    return max(fitting, key=len)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """The same with something in the place of each tensor. Raises Opaque for what may hold anything."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(map_tensors(item, function) for item in value)
    if type(value) is dict:
        return {key: map_tensors(item, function) for key, item in value.items()}
    if type(value) in PLAIN:
        return value
    raise Opaque
