"""Gives each element of a CPU graph the same bits, whatever is computed beside it.

PyTorch's compiler takes one approximation of exp for whole vectors and another for what is left over, and adds a single
row in another order than one of eight. So a token that is verified in a tree could differ from the same token decoded
alone. Here functions and reductions are replaced by ops of ours, and CONFIG makes the compiler round where the model
says so, in one thread. What it generates then is sums, products and quotients of elements, which have one result.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ...kernels.native_ops import EXACT_FUNCTIONS
from ..graph_edits import insert_call

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16)
CONFIG: dict[str, Any] = {"emulate_precision_casts": True, "cpp.threads": 1}

_FUNCTIONS = {
    aten.silu.default: "exact_silu",
    aten.sigmoid.default: "exact_sigmoid",
    aten.tanh.default: "exact_tanh",
    aten.cos.default: "exact_cos",
    aten.sin.default: "exact_sin",
    aten.exp.default: "exact_exp",
    aten.expm1.default: "exact_expm1",
    aten.log.default: "exact_log",
    aten.log1p.default: "exact_log1p",
}


def use_exact(exported: ExportedProgram) -> None:
    """Replace functions, reductions over the last dimension, sums over any one and norms, in place: those of float32
    and bfloat16 on the CPU."""
    for node in exported.graph_module.graph.nodes:
        replacement = _REPLACEMENTS.get(node.target)
        found = replacement(node) if replacement and fits(node) else None
        if found is not None:
            name, (x, *others) = found
            arguments = (_converted(node, x), *others)
            node.target, node.args, node.kwargs = getattr(torch.ops.specstep, name).default, arguments, {}


def keep_dimensions(exported: ExportedProgram) -> None:
    """Have sums and means over one dimension keep it, in place, and a view drop it: the form that `use_exact` knows."""
    for target in (aten.sum.dim_IntList, aten.mean.dim):
        for node in exported.graph_module.graph.find_nodes(op="call_function", target=target):
            _keep_dimension(node)


def multiply_at_once(exported: ExportedProgram) -> None:
    """Have functions of ours take the product with their only user's other factor, in place: an activation and its
    gate."""
    for node in exported.graph_module.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        _multiply_at_once(node)


def _keep_dimension(node: Node) -> None:
    x, dims, *keep = node.args
    if len(dims or ()) != 1 or keep[:1] == [True]:  # type: ignore[arg-type]
        return
    with node.graph.inserting_before(node):
        kept = node.graph.call_function(node.target, (x, dims, True), node.kwargs)  # type: ignore[arg-type]
    kept.meta = {**node.meta, "val": node.meta["val"].unsqueeze(dims[0])}  # type: ignore[index]
    node.target, node.args, node.kwargs = aten.squeeze.dim, (kept, dims[0]), {}  # type: ignore[index]


def _multiply_at_once(node: Node) -> None:
    functions = {getattr(torch.ops.specstep, f"exact_{name}").default for name in EXACT_FUNCTIONS}
    for function, factor in (node.args, node.args[::-1]):
        if not isinstance(function, Node) or not isinstance(factor, Node) or function is factor:
            continue
        if function.target not in functions:
            continue
        values = [given.meta["val"] for given in (function, factor, node)]
        alike = all((value.shape, value.dtype) == (values[0].shape, values[0].dtype) for value in values)
        if alike and len(function.users) == 1 and len(function.args) == 1:
            node.target, node.args, node.kwargs = function.target, (function.args[0], factor), {}
            node.graph.erase_node(function)
            return


def fits(node: Node) -> bool:
    """Whether a node makes float32 or bfloat16 of one of them, on the CPU."""
    x, out = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return x.device.type == "cpu" and x.dtype in DTYPES and out.dtype in DTYPES


def _converted(node: Node, x: Node) -> Node:
    """x in the dtype of the result: torch converts it first where another one is asked for."""
    dtype = node.meta["val"].dtype
    if x.meta["val"].dtype == dtype:
        return x
    with node.graph.inserting_before(node):
        return insert_call(node, aten.to.dtype, (x, dtype))


Replacement = tuple[str, tuple[Any, ...]] | None


def _function(node: Node) -> Replacement:
    return _FUNCTIONS[node.target], node.args[:1]  # type: ignore[index]


def _gelu(node: Node) -> Replacement:
    approximate = node.kwargs.get("approximate", "none")
    return "exact_gelu_tanh" if approximate == "tanh" else "exact_gelu", node.args[:1]


def _mean(node: Node) -> Replacement:
    x, dims, *keep = node.args
    last = x.meta["val"].dim() - 1  # type: ignore[union-attr]
    return ("exact_mean", (x,)) if dims in ([-1], [last]) and keep[:1] == [True] else None


def _sum(node: Node) -> Replacement:
    x, dims, *keep = node.args
    if len(dims or ()) != 1 or keep[:1] != [True]:  # type: ignore[arg-type]
        return None
    return "exact_sum", (x, dims[0] % x.meta["val"].dim())  # type: ignore[index, union-attr]


def _softplus(node: Node) -> Replacement:
    x, *others = node.args
    return ("exact_softplus", (x,)) if not node.kwargs and others in ([], [1], [1, 20]) else None


def _softmax(node: Node) -> Replacement:
    x, dim = node.args[:2]
    return ("exact_softmax", (x,)) if dim in (-1, x.meta["val"].dim() - 1) else None  # type: ignore[union-attr]


def _layer_norm(node: Node) -> Replacement:
    x, shape, weight, bias, epsilon = (*node.args, *(None, None, 1e-5)[len(node.args) - 2 :])[:5]
    return ("exact_layer_norm", (x, weight, bias, epsilon)) if len(shape) == 1 else None  # type: ignore[arg-type]


def _rms_norm(node: Node) -> Replacement:
    x, shape, weight, epsilon = (*node.args, *(None, None)[len(node.args) - 2 :])[:4]
    if len(shape) != 1:  # type: ignore[arg-type]
        return None
    if isinstance(weight, Node) and weight.meta["val"].dtype != torch.float32:  # torch rounds the last product alone
        with node.graph.inserting_before(node):
            weight = insert_call(node, aten.to.dtype, (weight, torch.float32))
    return "exact_rms_norm", (x, weight, torch.finfo(torch.float32).eps if epsilon is None else epsilon)


_REPLACEMENTS: dict[Any, Callable[[Node], Replacement]] = {
    **dict.fromkeys(_FUNCTIONS, _function),
    aten.gelu.default: _gelu,
    aten.softplus.default: _softplus,
    aten.mean.dim: _mean,
    aten.sum.dim_IntList: _sum,
    aten.softmax.int: _softmax,
    aten.layer_norm.default: _layer_norm,
    aten.rms_norm.default: _rms_norm,
}
