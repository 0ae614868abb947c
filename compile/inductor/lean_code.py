"""Has PyTorch's compiler generate less code, in less time and memory, that computes the same."""

import contextlib
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx, cpp_builder
from torch._inductor.codegen import cpp
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.fx_passes import post_grad
from torch._inductor.virtualized import V
from torch.fx import Graph, GraphModule, Node

_OPTIMIZATION = "_get_optimization_cflags"
_STRIDE = "stride_at_vec_range"
_UNLIFT = "_unlift_graph"
_COPY = "clone_preserve_strides"
_PROPAGATION = "fake_tensor_prop"
_WRITES = "decompose_auto_functionalized"
_INPUT_CHECKS = "generate_input_output_runtime_checks"


@contextlib.contextmanager
def no_input_checks() -> Iterator[None]:
    """Within it, generated code does not check its inputs, which it would do where an environment variable asks for it:
    half of all lines, and of the time of the C++ compiler. The session compares its tensors with the
    program's signature once."""
    if not hasattr(CppWrapperCpu, _INPUT_CHECKS):  # another version of PyTorch
        yield
        return
    generate = getattr(CppWrapperCpu, _INPUT_CHECKS)

    def generate_none(wrapper: CppWrapperCpu) -> None:
        with patch.object(V.graph, "graph_inputs", {}):
            generate(wrapper)

    with patch.object(CppWrapperCpu, _INPUT_CHECKS, generate_none):
        yield


@contextlib.contextmanager
def rules_made_once() -> Iterator[None]:
    """Within it, PyTorch's table of the dtypes of operations, of which it has one, is filled at its first use alone,
    not at each of thousands."""
    fill, filled = DtypePropagationOpsHandler.__init__, []

    def fill_once(handler: DtypePropagationOpsHandler) -> None:
        if handler not in filled:
            fill(handler)
            filled.append(handler)

    with patch.object(DtypePropagationOpsHandler, "__init__", fill_once):
        yield


@contextlib.contextmanager
def no_copies_of_weights() -> Iterator[None]:
    """Within it, weights are not copied before a program is compiled, which they are in case it writes to them: ours
    writes to none, and each process that compiles had a copy of all."""

    def same(tensor: Tensor) -> Tensor:
        return tensor

    unlift, known = getattr(compile_fx, _UNLIFT, None), hasattr(compile_fx, _COPY)
    if unlift is None or not known:
        yield
        return

    def unlift_alone(*given: Any) -> Any:
        with patch.object(compile_fx, _COPY, same):
            return unlift(*given)

    with patch.object(compile_fx, _UNLIFT, unlift_alone):
        yield


@contextlib.contextmanager
def strides_by_derivative() -> Iterator[None]:
    """Within it, how far apart an index lies for neighbouring values of a variable is its derivative, where it is a sum
    of products. PyTorch simplifies a difference, which took a fifth of all time in Python."""
    general = getattr(cpp, _STRIDE, None)
    if general is None:
        yield
        return

    def stride(index: sympy.Expr, variable: sympy.Symbol, *length: Any) -> sympy.Expr:
        slope = sympy.diff(index, variable) if _is_polynomial(index) else variable
        return general(index, variable, *length) if slope.has(variable) else slope

    with patch.object(cpp, _STRIDE, stride):
        yield


@functools.lru_cache(4096)
def _is_polynomial(index: sympy.Expr) -> bool:
    parts = (sympy.Symbol, sympy.Integer, sympy.Add, sympy.Mul, sympy.Pow)
    return all(isinstance(part, parts) for part in sympy.preorder_traversal(index))


@contextlib.contextmanager
def less_optimized() -> Iterator[None]:
    """Within it, the C++ compiler optimises kernels with -O2: with -O3 it takes a half longer, and they are as fast,
    since their loops are written as vectors."""
    flags = getattr(cpp_builder, _OPTIMIZATION, None)
    if flags is None:
        yield
        return

    def less(*given: Any, **named: Any) -> tuple[list[str], list[str]]:
        compiling, linking = flags(*given, **named)
        return ["O2" if flag == "O3" else flag for flag in compiling], linking

    with patch.object(cpp_builder, _OPTIMIZATION, less):
        yield


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
    if node.target is torch.ops.aten.copy_.default and "val" not in node.meta:  # a new value of an input, at the end
        node.meta["val"] = node.args[0].meta.get("val")  # type: ignore[union-attr]
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


LEAN = (
    no_input_checks,
    no_copies_of_weights,
    rules_made_once,
    strides_by_derivative,
    less_optimized,
    sizes_computed_once,
    writes_put_back,
)
