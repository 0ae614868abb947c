"""What `inspect` shows of a step: the shape of its tree, and its stages with their share of graph nodes and
parameters."""

from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from ..graphs.static_tree import StaticTree
from ..graphs.tree import TreeShape
from .assemble import FlatProgram

STAGES = ("draft", "verify", "accept", "commit")
OPS = {"specstep.tree_layout": "verify", "specstep.accept": "accept", "specstep.compact": "commit"}


def describe_tree(step: FlatProgram) -> dict[str, Any]:
    """Kind, nodes, depth, top_k and nodes expanded per level; the paths of a static tree."""
    shape: TreeShape = step.get_submodule("module.drafter").shape  # type: ignore[assignment]
    paths = shape.paths if isinstance(shape, StaticTree) else None
    kind = "static" if paths else "chain" if shape.top_k == 1 else "dynamic"
    numbers = {name: getattr(shape, name) for name in ("nodes", "depth", "top_k", "frontiers")}
    return {"kind": kind, "paths": paths} | numbers


def stage_shares(exported: ExportedProgram) -> dict[str, dict[str, int]]:
    """For each stage: its nodes in the exported graph and the parameters that only it or it first uses."""
    shares = {stage: {"nodes": 0, "parameters": 0} for stage in STAGES}
    for node in exported.graph.nodes:
        if node.op == "call_function":
            shares[_stage(node)]["nodes"] += 1
    counted: set[int] = set()
    for name in sorted(exported.state_dict, key=lambda name: ".drafter." in name):
        tensor = exported.state_dict[name]
        if tensor.data_ptr() not in counted:
            counted.add(tensor.data_ptr())
            shares["draft" if ".drafter." in name else "verify"]["parameters"] += tensor.numel()
    return shares


def _stage(node: Node) -> str:
    modules = " ".join(str(path) for path, _ in node.meta.get("nn_module_stack", {}).values())
    if ".drafter" in modules:
        return "draft"
    if ".target" in modules:
        return "verify"
    named = next((stage for op, stage in OPS.items() if str(node.target).startswith(op)), None)
    return named or ("accept" if "emit.py" in str(node.meta.get("stack_trace")) else "commit")
