"""What a model's code computes without looking at its inputs."""

import operator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import is_fake
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from .graph_edits import add_buffer

aten = torch.ops.aten
KEPT = aten.detach_.default  # the one write in place that changes nothing
COUNTED = aten.arange.start_step
RANDOM = torch.Tag.nondeterministic_seeded  # of ops that give another value each time
MOST = 65536  # elements that are held
POWER = aten.pow.Scalar


def fold_numbers(exported: ExportedProgram) -> None:
    """Put values in the place of what depends on tensors of one number alone, as `Normal(0, 1).icdf(torch.tensor(p))`
    does, and of powers of a range: rotary frequencies that a model computes in each pass. Each backend would keep such
    constants, or compute them, in a way of its own. Works in place."""
    known, powers = _known(exported)
    for node, value in known.items():
        users = [user for user in node.users if user not in known]
        if not users or not isinstance(value, Tensor) or (value.dim() and node not in powers):
            continue
        name = f"folded_{node.name}"
        new = add_buffer(exported, name, value, persistent=False) if value.dim() else _number(node, value)
        for user in users:
            user.replace_input_with(node, new)
    _hold_constants(exported)
    for node in reversed(known):
        if node.op != "placeholder" and not node.users:
            exported.graph.erase_node(node)


def _known(exported: ExportedProgram) -> tuple[dict[Node, Any], set[Node]]:
    """The values that are known, and lists of them, in the graph's order, and which of them depend on a power."""
    constants = exported.graph_signature.inputs_to_lifted_tensor_constants
    known: dict[Node, Any] = {}
    powers: set[Node] = set()
    for node in exported.graph.nodes:
        value, sources = None, node.all_input_nodes
        if node.op == "placeholder" and node.name in constants:
            held = exported.constants[constants[node.name]]
            value = held if held.dim() == 0 else None
        elif (sources or _counts(node)) and all(source in known for source in sources):
            value = _value(node, known)
        parts = value if isinstance(value, list) else [value]
        if all(isinstance(part, Tensor) and not is_fake(part) and part.numel() <= MOST for part in parts):
            known[node] = value
            if node.target == POWER or powers.intersection(sources):
                powers.add(node)
    return known, powers


def _counts(node: Node) -> bool:
    """Whether it is a range on the CPU: that of a described GPU could not be had."""
    return node.target == COUNTED and node.meta["val"].device.type == "cpu"


def _value(node: Node, known: dict[Node, Any]) -> Any:
    """What a node makes of known values, None where it does more than compute."""
    op = node.target
    computes = isinstance(op, OpOverload) and (not op._schema.is_mutable or op == KEPT) and RANDOM not in op.tags
    if not computes and op != operator.getitem:
        return None
    arguments, named = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
    return op(*arguments, **named)  # type: ignore[operator]


def _number(node: Node, value: Tensor) -> Node:
    with node.graph.inserting_after(node):
        new = node.graph.call_function(aten.full.default, ([], value.item()))
    new.kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    new.meta = dict(node.meta)
    return new


def _hold_constants(exported: ExportedProgram) -> None:
    """Make buffers of other constants of the code: the compiler gives those names of its own."""
    for spec in exported.graph_signature.input_specs:
        if spec.kind == InputKind.CONSTANT_TENSOR:
            spec.kind, spec.persistent = InputKind.BUFFER, False
