"""What `inspect` shows of a step: the shape of its tree, and its stages with their share of graph nodes and
parameters."""

from collections import Counter
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ..graphs.static_tree import StaticTree
from ..graphs.tree import TreeShape
from .assemble import FlatProgram

STAGES = ("verify", "accept", "commit", "draft")  # in their order
# Products, reductions and functions that rewrites look for.
REPLACEABLE = {
    f"aten::{name}"
    for name in (
        *("linear", "addmm", "matmul", "bmm", "mm", "softmax", "mean", "rsqrt", "layer_norm"),
        *("silu", "gelu", "sigmoid", "tanh", "cos", "sin"),
    )
}
BEGINS = {"specstep.accept": "accept", "specstep.compact": "commit"}  # ops that open a stage


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
    current = "verify"
    for node in exported.graph.nodes:
        if node.op == "call_function":
            current = next((stage for op, stage in BEGINS.items() if str(node.target).startswith(op)), current)
            shares[_module_stage(node) or current]["nodes"] += 1
    counted: set[int] = set()
    for name in sorted(exported.state_dict, key=lambda name: ".drafter." in name):
        tensor = exported.state_dict[name]
        if tensor.data_ptr() not in counted:
            counted.add(tensor.data_ptr())
            shares["draft" if ".drafter." in name else "verify"]["parameters"] += tensor.numel()
    return shares


def count_operators(exported: ExportedProgram) -> dict[str, int]:
    """How often the step calls each operator of ours, and each of PyTorch's that ours could have taken the place of."""
    operators = [node.target for node in exported.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    names = [operator.name().partition(".")[0] for operator in operators]  # library::operator, less the overload
    counts = Counter(name for name in names if name.startswith("specstep::") or name in REPLACEABLE)
    return dict(counts.most_common())


def _module_stage(node: Node) -> str | None:
    """The stage whose module a node belongs to, None for the step's own nodes."""
    modules = " ".join(str(path) for path, _ in node.meta.get("nn_module_stack", {}).values())
    return "draft" if ".drafter" in modules else "verify" if ".target" in modules else None
