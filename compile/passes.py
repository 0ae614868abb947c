"""Rewrites of an exported graph, before it is decomposed and compiled."""

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from ..kernels.linear import load_library

SMALL_LINEAR_DTYPES = (torch.bfloat16, torch.float32)


def use_small_linear(exported: ExportedProgram | GraphModule) -> int:
    """Replaces `aten.linear` on the CPU by `specstep::small_linear`, in place, and returns how many were replaced.

    A linear is replaced when x and weight are both bfloat16 or both float32, on the CPU, and the weight [N, K] is a
    parameter or buffer as it is stored. Others stay. Call this before `run_decompositions` and before compiling: both
    turn `aten.linear` into something else.
    """
    load_library()
    module = exported.graph_module if isinstance(exported, ExportedProgram) else exported
    weights = _stored_tensors(exported)
    count = 0
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
        if node.args[1] in weights and _fits(node):
            node.target = torch.ops.specstep.small_linear.default
            count += 1
    module.recompile()
    return count


def _stored_tensors(exported: ExportedProgram | GraphModule) -> set[Node]:
    """The nodes that are parameters or buffers: placeholders of a program, get_attr of a graph module."""
    if isinstance(exported, GraphModule):
        return set(exported.graph.find_nodes(op="get_attr"))
    stored = (InputKind.PARAMETER, InputKind.BUFFER)
    names = {spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind in stored}
    return {node for node in exported.graph_module.graph.find_nodes(op="placeholder") if node.name in names}


def _fits(node: Node) -> bool:
    values = [argument.meta["val"] for argument in node.args[:2] if isinstance(argument, Node)]
    return (
        len(values) == 2
        and values[0].dtype == values[1].dtype
        and values[0].dtype in SMALL_LINEAR_DTYPES
        and all(value.device.type == "cpu" for value in values)
        and values[1].dim() == 2
        and values[1].is_contiguous()
    )
