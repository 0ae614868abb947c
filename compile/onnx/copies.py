"""Makes the compaction of caches one node of ours for each, and a copy."""

from typing import Any

import torch
from torch.export import ExportedProgram

from ...kernels.compact.op import compact, compacted
from ..graph_edits import insert_call


def copy_compacted(exported: ExportedProgram) -> None:
    """Replaces `specstep::compact` by `specstep::compacted` and a copy for each cache, in place: a form that still is
    one node of our own once writes in place are gone. A path of the root alone moves nothing: its compaction goes."""
    graph = exported.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=compact._opoverload):
        arguments: list[Any] = list(node.args)
        caches, lengths, path, accepted = arguments
        with graph.inserting_before(node):
            for cache in caches if path.meta["val"].shape[1] > 1 else ():
                new = insert_call(node, compacted._opoverload, (cache, lengths, path, accepted))
                insert_call(node, torch.ops.aten.copy_.default, (cache, new))
        graph.erase_node(node)
    exported.graph_module.recompile()
