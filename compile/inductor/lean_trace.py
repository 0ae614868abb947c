"""Has PyTorch trace a program less often before it is compiled; what is compiled is the same."""

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._functorch import aot_autograd
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx
from torch._inductor.fx_passes import post_grad
from torch.fx import Graph, GraphModule, Node

from ..graph_edits import base_of, written_arguments

_PROPAGATION = "fake_tensor_prop"
_WRITES = "decompose_auto_functionalized"
_EXPORT = "aot_export_module"
_ALIASES = "run_functionalized_fw_and_collect_metadata"


@contextlib.contextmanager
def sizes_computed_once() -> Iterator[None]:
    """Within it, a graph whose values' sizes are known is not run again for them: PyTorch has traced it just before."""
    propagate = getattr(compile_fx, _PROPAGATION, None)
    if propagate is None:
        yield
        return

    def propagate_unknown(module: GraphModule, inputs: Sequence[Any], *given: Any, **named: Any) -> Any:
        mode = detect_fake_mode(inputs)
        known = mode is not None and all(map(_is_known, module.graph.nodes))
        return mode if known else propagate(module, inputs, *given, **named)

    with patch.object(compile_fx, _PROPAGATION, propagate_unknown):
        yield


def _is_known(node: Node) -> bool:
    """Whether a node's value is known, from now on."""
    if node.target is torch.ops.aten.copy_.default:  # a new value of an input, at the end
        node.meta.setdefault("val", node.args[0].meta["val"])  # type: ignore[union-attr]
    schema = getattr(node.target, "_schema", None)
    return node.op != "call_function" or "val" in node.meta or (schema is not None and not schema.returns)


@contextlib.contextmanager
def writes_put_back() -> Iterator[None]:
    """Within it, an op that may write in place is put back into the graph directly. PyTorch traces a function that
    calls it, for each anew."""
    general = getattr(post_grad, _WRITES, None)
    if general is None:
        yield
        return

    def put_back(graph: Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.auto_functionalized_v2):
            _put_back(graph, node)
        general(graph)

    with patch.object(post_grad, _WRITES, put_back):
        yield


def _put_back(graph: Graph, node: Node) -> None:
    """Replace a call of `auto_functionalized_v2` that copies nothing by one of the op that it stands for."""
    op, given = node.args[0], dict(node.kwargs)
    bases: Any = given.pop("_all_bases", None)
    if node.meta.get("only_clone_these_tensors") != [] or not isinstance(op, torch._ops.OpOverload):
        return
    if "eager_input_vals" in node.meta:  # strides that the op asks for
        return
    if any(argument.kwarg_only for argument in op._schema.arguments):
        return
    if any(user.target is not operator.getitem for user in node.users):
        return
    try:
        arguments = tuple(_argument(argument, given, bases) for argument in op._schema.arguments)
    except KeyError:  # a view of a tensor
        return
    if given:
        return
    values, count = node.meta["val"], max(len(op._schema.returns), 1)
    with graph.inserting_before(node):
        call = graph.call_function(op, arguments)
        call.meta = {**node.meta, "val": values[0] if count == 1 else tuple(values[:count])}
        for user in list(node.users):
            index: Any = user.args[1]
            result = bases[index - count] if index >= count else call
            if index < count and count > 1:
                result = graph.call_function(operator.getitem, (call, index))
                result.meta = dict(user.meta)
            user.replace_all_uses_with(result)
            graph.erase_node(user)
    graph.erase_node(node)


def _argument(argument: Any, given: dict[str, Any], bases: Sequence[Any]) -> Any:
    """An op's argument, taken out of what `auto_functionalized_v2` is called with. Raises KeyError."""
    if argument.alias_info is None or not argument.alias_info.is_write:
        return given.pop(argument.name)

    def base(name: str) -> Any:
        index = given.pop(f"_{name}_base_index")
        return None if index is None else bases[index]

    length = given.pop(f"_{argument.name}_length", None)
    if length is None:
        return base(argument.name)
    return [base(f"{argument.name}_{index}") for index in range(length)]


@contextlib.contextmanager
def aliases_read_from_graph() -> Iterator[None]:
    """Within it, which inputs a graph writes to, and which of its results are new, is read from the schemas of its
    ops. PyTorch runs the graph for that, and then again to trace it."""
    export, collect = getattr(compile_fx, _EXPORT, None), getattr(aot_autograd, _ALIASES, None)
    if export is None or collect is None:
        yield
        return

    def export_once(module: Any, *given: Any, **named: Any) -> Any:
        short = _with_the_aliases_of(module) if isinstance(module, GraphModule) else None

        def collect_shortly(function: Any, **wanted: Any) -> Any:
            return collect(function if short is None else short, **wanted)

        with patch.object(aot_autograd, _ALIASES, collect_shortly):
            return export(module, *given, **named)

    with patch.object(compile_fx, _EXPORT, export_once):
        yield


def _with_the_aliases_of(module: GraphModule) -> Callable[..., list[Any]] | None:
    """A function that writes to the same inputs as a graph and returns new tensors of the same sizes; None where a
    result may be part of an input. It takes weights, and then the graph's inputs."""
    graph = module.graph
    inputs = graph.find_nodes(op="placeholder")
    results: list[Any] = list(torch.utils._pytree.tree_leaves(graph.output_node().args))
    written = {base_of(each) for node in graph.nodes for each in written_arguments(node)}
    if (
        not all(map(_has_a_schema, graph.nodes))
        or not all(isinstance(result, Node) and isinstance(result.meta.get("val"), Tensor) for result in results)
        or any(map(_may_be_an_input, results))
        or any(node.op == "get_attr" or (node.op == "call_function" and _may_be_an_input(node)) for node in written)
    ):
        return None
    places, values = [inputs.index(node) for node in written if node in inputs], [node.meta["val"] for node in results]

    def run(*given: Any) -> list[Any]:
        own = given[len(given) - len(inputs) :]
        for place in places:
            own[place].zero_()
        return [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device) for value in values
        ]

    return run


def _has_a_schema(node: Node) -> bool:
    """Whether it is known what a call writes to: of an op, of an item, or of a computation of sizes."""
    known = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
    return known or node.op != "call_function" or isinstance(node.meta.get("val"), torch.SymInt)


def _may_be_an_input(result: Node) -> bool:
    """Whether a result may be a part of an input: by its op's schema, or where the op stands for others, which may
    return what they are given."""
    base = base_of(result)
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return base.op != "call_function" or (
        isinstance(base.target, torch._ops.OpOverload)
        and base.target.has_kernel_for_dispatch_key(composite)
        and base.target.overloadpacket is not torch.ops.aten.where
    )


TRACED_LESS = (sizes_computed_once, writes_put_back, aliases_read_from_graph)
