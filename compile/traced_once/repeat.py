"""Repeats what one layer was traced to for another that is alike."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node, Proxy
from torch.fx.experimental.proxy_tensor import track_tensor

from ...graphs.attention import Write
from ...graphs.hybrid_cache import name_of_layer
from .call import Call, Traced, base_name, map_tensors


def repeat(traced: Traced, call: Call) -> Any:
    """Add the nodes of a traced call for another call of its kind -> what that returns, its passes told the same."""
    return _Repetition(traced, call).run()


class _Repetition:
    def __init__(self, traced: Traced, call: Call):
        self.traced, self.call = traced, call
        self.copies: dict[Node, Node] = {}
        before = zip(traced.call.tensors, call.tensors, strict=True)
        self.tensors: dict[int, Tensor] = {id(theirs): ours for theirs, ours in before}

    def run(self) -> Any:
        for node in self.traced.nodes:
            self.copies[node] = self._copy(node)
        for theirs, ours in zip(self.traced.call.tensors, self.call.tensors, strict=True):
            self._track(ours, self.traced.places[id(theirs)])  # what was written to
        result, writes, left = map_tensors(self.traced.outcome, self._tensor)
        for where, functions, tensors, earlier in zip(
            self.call.given.passes, self.traced.functions, writes, left, strict=True
        ):
            where.writes += map(Write, functions, tensors)
            where.earlier |= {name_of_layer(name, self.call.number): tensor for name, tensor in earlier.items()}
        for name, count in self.traced.calls.items():
            self.call.tracer.num_calls[self.call.path + name] = self.call.called.get(name, 0) + count
        return result

    def _node(self, node: Node) -> Node:
        role = self.traced.roles.get(node)
        return self.copies.get(node, node) if role is None else self.call.nodes[role]

    def _copy(self, node: Node) -> Node:
        given, named = torch.fx.node.map_arg((node.args, node.kwargs), self._node)
        copy: Node = node.graph.create_node(node.op, node.target, given, named, base_name(node))
        stack = {
            self._path(key): (self._path(name), kind) for key, (name, kind) in node.meta["nn_module_stack"].items()
        }
        copy.meta = {**node.meta, "nn_module_stack": stack}
        return copy

    def _path(self, name: str) -> str:
        within = self.traced.call.within(name)
        return name if within is None else self.call.path + within

    def _track(self, tensor: Tensor, theirs: Node) -> None:
        if theirs in self.copies:
            track_tensor(tensor, Proxy(self.copies[theirs], self.call.tracer), constant=None, tracer=self.call.tracer)

    def _tensor(self, theirs: Tensor) -> Tensor:
        """What takes a tensor's place: the one that this layer was given, a new one, or the same."""
        node = self.traced.places[id(theirs)]
        if id(theirs) not in self.tensors and node in self.copies:
            new = torch.empty_strided(theirs.shape, theirs.stride(), dtype=theirs.dtype, device=theirs.device)
            self._track(new, node)
            self.tensors[id(theirs)] = new
        role = self.traced.roles.get(node)
        return self.tensors.get(id(theirs), theirs if role is None else self.call.tensors[role])
