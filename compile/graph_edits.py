"""What rewrites of exported graphs share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Node

aten = torch.ops.aten
CONVERSIONS = (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.type_as.default)  # of dtypes
LINEAR = aten.linear.default
ASSERTION = aten._assert_tensor_metadata.default  # the exporter puts one ahead of each conversion


def insert_call(place: Node, op: Any, arguments: Sequence[Any]) -> Node:
    """Adds a call at the graph's insertion point, with the module and source line of `place`, its value known."""
    new = place.graph.call_function(op, tuple(arguments))
    values = torch.fx.map_arg(new.args, lambda argument: argument.meta["val"])
    mode = detect_fake_mode(values)
    assert mode is not None
    with mode, enable_python_dispatcher():  # which knows sizes that vary, in every torch
        new.meta = {**place.meta, "val": op(*values)}
    return new


def add_buffer(exported: ExportedProgram, name: str, tensor: Tensor, *, persistent: bool, device: Any = None) -> Node:
    """The placeholder of a new buffer of a program, on `device`, by default its own. persistent: it is of the state,
    not of the constants."""
    specs, placeholders = exported.graph_signature.input_specs, exported.graph.find_nodes(op="placeholder")
    place = next(index for index, spec in enumerate(specs) if spec.kind == InputKind.USER_INPUT)
    mode = detect_fake_mode([placeholder.meta.get("val") for placeholder in placeholders])
    assert mode is not None
    with exported.graph.inserting_before(placeholders[place]):
        new = exported.graph.placeholder(name.replace(".", "_"))
    new.meta["val"] = mode.from_tensor(tensor, static_shapes=True).to(device or tensor.device)
    specs.insert(place, InputSpec(InputKind.BUFFER, TensorArgument(name=new.name), name, persistent=persistent))
    (exported.state_dict if persistent else exported.constants)[name] = tensor
    return new


def drop_assertions(node: Node) -> bool:
    """Erase what uses a node, where that is assertions alone, and say whether it is used no more."""
    if any(user.target != ASSERTION for user in node.users):
        return False
    for user in list(node.users):
        node.graph.erase_node(user)
    return True


def drop_dead_code(exported: ExportedProgram) -> None:
    """Erase what no output and no write to an input depends on: a prefill asks for no logits, so that of its last
    layer all behind keys and values goes, and so do layers that have none. With it go assertions of dtypes, which were
    those of the trace: torch 2.11 makes another one of a scatter over zeros, which changes nothing, and would stop at
    what asserts it."""
    live: set[Node] = set()
    read: set[Node] = set()  # tensors whose elements are: what was written to them before is live, too
    for node in reversed(exported.graph.nodes):
        written = {base_of(value) for value in written_arguments(node)}
        kept = node.op in ("placeholder", "output") or any(base.op == "placeholder" for base in written)
        kept |= node in live or bool(written & read) or (not written and node.target != ASSERTION and node.is_impure())
        if not kept:
            continue
        live |= {node, *node.all_input_nodes}
        read |= {base_of(source) for source in node.all_input_nodes}
    # Layers of one x become one product, whose weights programs share: what stands beside one that stays does, too.
    shared = {node.args[0] for node in live if node.target == LINEAR}
    live |= {node for node in exported.graph.nodes if node.target == LINEAR and node.args[0] in shared}
    for node in reversed(exported.graph.nodes):
        if node not in live:
            exported.graph.erase_node(node)


def written_arguments(node: Node) -> list[Node]:
    """The arguments that a node writes to in place."""
    schema = getattr(node.target, "_schema", None)
    arguments = schema.arguments if schema is not None else ()
    given = dict(zip((argument.name for argument in arguments), node.args, strict=False)) | node.kwargs
    written: list[Node] = []
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in given:
            value = given[argument.name]
            values = value if isinstance(value, list | tuple) else [value]
            written += [each for each in values if isinstance(each, Node)]
    return written


def base_of(node: Node) -> Node:
    """What a node is a view of."""
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.returns[0].alias_info is None:
            break
        source = node.kwargs.get("out", node.args[0])  # of a view, of a write in place, or of `getitem`
        if not isinstance(source, Node):
            break
        node = source
    return node
