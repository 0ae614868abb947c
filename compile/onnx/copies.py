"""Makes each write in place by an op of ours one node of ours, and a copy."""

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ...kernels.compact.op import compact, compacted
from ...kernels.fold.op import fold, folded
from ...kernels.shift.op import shift, shifted
from ..graph_edits import insert_call

RETURNING = {  # in place -> what returns a new tensor instead of its first argument
    fold._opoverload: folded._opoverload,
    shift._opoverload: shifted._opoverload,
}


def copy_committed(exported: ExportedProgram) -> None:
    """Replaces what commits an accepted path in place by an op that returns a new tensor, for each of its tensors, and
    a copy: a form that still is one node of our own once writes in place are gone. A path of the root alone moves
    nothing in the caches: their compaction goes."""
    graph = exported.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=compact._opoverload):
        arguments: list[Any] = list(node.args)
        caches, *rest = arguments
        moves = rest[1].meta["val"].shape[1] > 1
        for cache in caches if moves else ():
            _copy(node, compacted._opoverload, (cache, *rest))
        graph.erase_node(node)
    for target, returning in RETURNING.items():
        for node in graph.find_nodes(op="call_function", target=target):
            _copy(node, returning, node.args)
            graph.erase_node(node)


def _copy(node: Node, returning: Any, arguments: Any) -> None:
    with node.graph.inserting_before(node):
        new = insert_call(node, returning, arguments)
        insert_call(node, torch.ops.aten.copy_.default, (arguments[0], new))
