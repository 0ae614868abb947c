"""What a model's code computes of numbers alone."""

import operator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import is_fake
from torch.export import ExportedProgram
from torch.fx import Node

aten = torch.ops.aten
KEPT = aten.detach_.default  # the one write in place that changes nothing


def fold_numbers(exported: ExportedProgram) -> None:
    """Put values in the place of what depends on tensors of one number alone, as `Normal(0, 1).icdf(torch.tensor(p))`
    does: each backend would keep such a constant in a way of its own. Works in place."""
    known = _known(exported)
    for node, value in known.items():
        users = [user for user in node.users if user not in known]
        if not users or not isinstance(value, Tensor):
            continue
        with node.graph.inserting_after(node):
            number = node.graph.call_function(aten.full.default, ([], value.item()))
        number.kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        number.meta = dict(node.meta)
        for user in users:
            user.replace_input_with(node, number)
    for node in reversed(known):
        if node.op != "placeholder" and not node.users:
            exported.graph.erase_node(node)
    exported.graph_module.recompile()


def _known(exported: ExportedProgram) -> dict[Node, Any]:
    """The numbers that are known, and lists of them, in the graph's order, from the constants of the code on."""
    constants = exported.graph_signature.inputs_to_lifted_tensor_constants
    known: dict[Node, Any] = {}
    for node in exported.graph.nodes:
        value = None
        if node.op == "placeholder" and node.name in constants:
            value = exported.constants[constants[node.name]]
        elif node.all_input_nodes and all(source in known for source in node.all_input_nodes):
            value = _value(node, known)
        parts = value if isinstance(value, list) else [value]
        if all(isinstance(part, Tensor) and part.dim() == 0 and not is_fake(part) for part in parts):
            known[node] = value
    return known


def _value(node: Node, known: dict[Node, Any]) -> Any:
    """What a node makes of numbers, None where it does more than compute."""
    computes = isinstance(node.target, OpOverload) and (not node.target._schema.is_mutable or node.target == KEPT)
    if not computes and node.target != operator.getitem:
        return None
    arguments, named = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
    return node.target(*arguments, **named)  # type: ignore[operator]
