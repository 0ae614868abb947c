"""Puts one op in the place of calls of a layer's op that follow one another: a loop over layers, which costs the
compiler what a single call does."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from ..graph_edits import base_of, written_arguments
from .layer_ops import LayerKind, define_op, overload


@dataclass(frozen=True)
class LayerLoop:
    """A loop over layers of a kind. op: its name in `torch.ops.specstep`. own: the places of arguments of which each
    layer has its own, as weights and caches: the loop is given a list of them. carried: for the place of an argument,
    the number of the result of the layer before that it is; the loop is given the argument of the first layer. All
    layers share the other arguments."""

    op: str
    kind: LayerKind
    own: frozenset[int]
    carried: Mapping[int, int]

    @property
    def overload(self) -> Any:
        """The op that a graph calls."""
        return overload(self.op)


def join_calls(graph: Graph, kinds: Sequence[LayerKind]) -> list[LayerLoop]:
    """Replace calls of layers of a kind that only hand on to the next by loops, in place -> the loops."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    loops: dict[Any, LayerLoop] = {}
    for kind in kinds:
        rest = list(graph.find_nodes(op="call_function", target=kind.overload))
        while rest:
            chain = _Chain(kind, rest, places)
            count = len(chain.calls)
            if count > 1:
                key = kind.op, chain.own, tuple(chain.carried.items())
                if key not in loops:
                    loops[key] = _make_loop(kind, chain)
                places.update(dict.fromkeys(_replace(graph, chain, loops[key]), places[chain.calls[0]]))
            rest = rest[count:]
    return list(loops.values())


class _Chain:
    """The first of some calls, and those behind it that can be a loop with it."""

    def __init__(self, kind: LayerKind, calls: Sequence[Node], places: Mapping[Node, int]):
        self.kind, self.places, self.calls = kind, places, [calls[0]]
        self.own: frozenset[int] = frozenset()
        self.carried: dict[int, int] = {}
        for call in calls[1:]:
            if not self._take(call):
                break

    def _take(self, call: Node) -> bool:
        """Add a call, if it is one more turn -> whether it is. The second one says which arguments change, and how."""
        before = self.calls[-1]
        results = _results(before)
        carried = {place: results[x] for place, x in enumerate(call.args) if x in results}
        pairs = enumerate(zip(before.args, call.args, strict=True))
        own = frozenset(place for place, (theirs, ours) in pairs if ours is not theirs and place not in carried)
        if len(self.calls) > 1 and (carried != self.carried or not own <= self.own):
            return False
        if not own | self.own:
            return False
        if any(user not in (call, *results) for result in results for user in result.users):
            return False
        if any(self.places[call.args[place]] > self.places[self.calls[0]] for place in own):  # type: ignore[index]
            return False
        if not self._is_alone_with(call):
            return False
        self.own, self.carried = own | self.own, carried
        self.calls.append(call)
        return True

    def _is_alone_with(self, call: Node) -> bool:
        """Whether each call writes to what no other is given, and what lies between the first and this one, which will
        come behind all, neither reads what these write, nor writes to what they read."""
        calls, other = [*self.calls, call], _Use()
        node = calls[0].next
        while node is not call:
            if node not in calls and (node.target is not operator.getitem or node.args[0] not in calls):
                other.add(node)
            node = node.next
        own = _Use()
        for each in calls:
            if own.read & _bases(written_arguments(each)) or own.written & _bases(each.all_input_nodes):
                return False
            own.add(each)
        return not own.written & other.read and not other.written & own.read

    def given(self) -> tuple[Any, ...]:
        """The loop's arguments."""
        first = self.calls[0].args
        return tuple(
            [call.args[place] for call in self.calls] if place in self.own else x for place, x in enumerate(first)
        )


class _Use:
    """What nodes read, and what they write to, which they read, too."""

    def __init__(self) -> None:
        self.read, self.written = set[Node](), set[Node]()

    def add(self, node: Node) -> None:
        self.read |= _bases(node.all_input_nodes)
        self.written |= _bases(written_arguments(node))


def _bases(nodes: Iterable[Node]) -> set[Node]:
    return set(map(base_of, nodes))


def _results(call: Node) -> dict[Any, int]:
    """The nodes of a call's results, and their numbers."""
    if isinstance(call.meta["val"], Tensor):
        return {call: 0}
    return {user: user.args[1] for user in call.users}  # type: ignore[misc]


def _make_loop(kind: LayerKind, chain: _Chain) -> LayerLoop:
    """The op of a loop, known to torch."""
    own = chain.own

    def fake(*given: Any) -> Any:
        return kind.fake(*(x[0] if place in own else x for place, x in enumerate(given)))

    arguments = []
    for place, argument in enumerate(kind.overload._schema.arguments):
        write = f"(a{place}!)" if argument.alias_info is not None else ""
        arguments.append(f"Tensor{write}{'[]' if place in own else ''} {argument.name}")
    return LayerLoop(define_op(f"{kind.op}_loop", arguments, kind.outputs, fake), kind, own, dict(chain.carried))


def _replace(graph: Graph, chain: _Chain, loop: LayerLoop) -> list[Node]:
    """Put a loop in the place of its calls; what the last one returns, it does -> the new nodes."""
    first, last = chain.calls[0], chain.calls[-1]
    with graph.inserting_before(first):
        call = graph.call_function(loop.overload, chain.given())
        call.meta = dict(last.meta)
        new = [call]
        for result, number in _results(last).items():
            if result is not last:
                new.append(graph.call_function(operator.getitem, (call, number)))
                new[-1].meta = dict(result.meta)
            result.replace_all_uses_with(new[-1])
    for each in reversed(chain.calls):
        for result in _results(each):
            if result is not each:
                graph.erase_node(result)
        graph.erase_node(each)
    return new
