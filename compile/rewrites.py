"""Rewrites of an exported graph, before it is decomposed and compiled."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from ..kernels.compact.op import compact, compacted
from ..kernels.native import load_library
from ..kernels.tree_attention.op import masked_attention, tree_attention, visible_slots

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


def share_masks(exported: ExportedProgram) -> None:
    """Replaces `specstep::tree_attention` on the CPU by its two halves, in place, with one mask for all layers of a
    pass that have the same window: the compiler does not merge equal subgraphs and would rebuild it in each layer.
    """
    graph = exported.graph_module.graph
    masks: dict[tuple[Any, ...], Node] = {}
    for node in graph.find_nodes(op="call_function", target=tree_attention._opoverload):
        left_out = tree_attention._opoverload._schema.arguments[len(node.args) :]
        arguments: list[Any] = [*node.args, *(argument.default_value for argument in left_out)]
        q, k, v, *where, scale, window, softcap, sinks = arguments
        if q.meta["val"].device.type != "cpu":
            continue
        with graph.inserting_before(node):
            if (*where, window) not in masks:  # all layers have the same slots
                slots = insert_call(node, torch.ops.aten.sym_size.int, (k, 2))
                masks[*where, window] = insert_call(node, visible_slots._opoverload, (*where, slots, window))
            halves = (q, k, v, masks[*where, window], scale, softcap, sinks)
            node.replace_all_uses_with(insert_call(node, masked_attention._opoverload, halves))
        graph.erase_node(node)
    exported.graph_module.recompile()


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


def insert_call(place: Node, op: Any, arguments: Sequence[Any]) -> Node:
    """Adds a call at the graph's insertion point, with the module and source line of `place`, its value known."""
    new = place.graph.call_function(op, tuple(arguments))
    values = torch.fx.map_arg(new.args, lambda argument: argument.meta["val"])
    mode = detect_fake_mode(values)
    assert mode is not None
    with mode:
        new.meta = {**place.meta, "val": op(*values)}
    return new
