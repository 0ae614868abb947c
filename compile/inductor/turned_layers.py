"""Writes the product of a weight and a turned x as the linear layer that it is, which has the same bits in any company,
and weights that are packed: Mamba's code has its time steps so."""

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ..graph_edits import insert_call

aten = torch.ops.aten


def use_linear(exported: ExportedProgram) -> None:
    """weight [N, K] @ x^T, of x [B, T, K], becomes the transpose of linear(x, weight), in place."""
    graph = exported.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=aten.matmul.default):
        weight, turned = node.args
        x = _turned(turned)
        if x is None or weight.op != "placeholder" or weight.meta["val"].dim() != 2:
            continue
        with graph.inserting_before(node):
            out = insert_call(node, aten.linear.default, (x, weight))
            back = insert_call(node, aten.transpose.int, (out, 1, 2))
        node.replace_all_uses_with(back)
        graph.erase_node(node)


def _turned(node: Any) -> Node | None:
    """x [B, T, K] of its transpose over the last two dimensions, None for anything else."""
    if not isinstance(node, Node) or node.target != aten.transpose.int:
        return None
    x, *dimensions = node.args
    assert isinstance(x, Node)
    return x if x.meta["val"].dim() == 3 and {d % 3 for d in dimensions} == {1, 2} else None  # type: ignore[operator]
