"""Finds what a CPU program still computes, after all rewrites, that may have other bits in other company.

An op counts unless the list below has it, of ops that give each element one result. An exact op that the list lacks
costs a mark that the engine does not need; a list of inexact ops that lacked one would let it through without a word.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from ...kernels.expert_linear.op import expert_linear

# IEEE 754 gives these one result, so vectors and what is left over agree, but for products of complex numbers.
_ELEMENTS = {
    "abs", "add", "ceil", "clamp", "clamp_max", "clamp_min", "div", "floor", "hardtanh", "leaky_relu", "masked_fill",
    "maximum", "minimum", "mul", "multiply", "neg", "reciprocal", "relu", "round", "rsqrt", "rsub", "sign", "sqrt",
    "square", "sub", "trunc", "where",
}  # fmt: skip
_MOVES = {
    "_to_copy", "arange", "broadcast_tensors", "cat", "clone", "concat", "concatenate", "constant_pad_nd", "copy",
    "embedding", "empty", "empty_like", "fill", "flip", "full", "full_like", "gather", "index", "index_copy",
    "index_put", "index_select", "lift_fresh_copy", "new_empty", "new_full", "new_ones", "new_zeros", "ones",
    "ones_like", "pad", "repeat", "repeat_interleave", "roll", "scalar_tensor", "scatter", "select_scatter",
    "slice_scatter", "stack", "tile", "to", "tril", "triu", "type_as", "zero", "zeros", "zeros_like",
}  # fmt: skip
_CHOICES = {"amax", "amin", "aminmax", "max", "min", "sort", "topk"}  # one of the elements
_EXACT = _ELEMENTS | _MOVES | _CHOICES
_LARGEST_POWER = 32  # what the compiler writes as products


def left_over(programs: Iterable[ExportedProgram]) -> list[str]:
    """The ops of the target model that may give other bits in other company, each with its place and how often it is
    there: "aten.bmm in model.layers.*.attn (24)". Drafts change no text where there is none. What drafts is left out,
    for no text depends on it, and so is what chooses and accepts, which is ops of ours and integers."""
    found: Counter[str] = Counter()
    for program in programs:
        inexact = [node for node in program.graph.nodes if not _exact(node)]
        here = [(_name(node.target), place) for node in inexact if (place := _place(node))]
        found |= Counter(f"{name} in {place}" for name, place in here)  # programs hold the same model
    return [f"{what} ({count})" for what, count in found.most_common()]


def _place(node: Node) -> str | None:
    """The module of the target that a node is of, layers without their number; None for what is of no target."""
    modules = [str(path) for path, _ in node.meta.get("nn_module_stack", {}).values()]
    path = modules[-1] if modules else ""
    if ".target" not in path or ".drafter" in path:
        return None
    return re.sub(r"\.\d+", ".*", path.partition(".target")[2].removeprefix(".")) or "the model"


def _name(op: Any) -> str:
    return f"{op.namespace}.{op.name().rpartition('::')[2].partition('.')[0]}"


def _exact(node: Node) -> bool:
    op, values = node.target, node.meta.get("val")
    if isinstance(op, torch._ops.HigherOrderOperator):  # whose graphs are not walked
        return False
    if node.op != "call_function" or not isinstance(op, torch._ops.OpOverload):  # the latter: `getitem`, sizes
        return True
    results = values if isinstance(values, list | tuple) else [values]
    tensors = [result for result in results if isinstance(result, Tensor) and _is_float(result)]
    name, viewed = op._schema.name.partition("::")[2].removesuffix("_"), op._schema.returns[:1]
    if not tensors or op.namespace == "specstep":
        return op != expert_linear._opoverload  # which calls a library's product, where it was not packed
    if name == "pow":
        return _is_product(node.args[1])
    if name == "mul" and any(tensor.is_complex() for tensor in tensors):
        return False
    if name == "dropout":
        return node.args[2] is False
    if name == "index_put":
        return True not in node.args and not node.kwargs
    if name == "scatter":
        return not node.kwargs
    return name in _EXACT or (viewed[0].alias_info is not None and not viewed[0].alias_info.is_write)


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_product(exponent: Any) -> bool:
    """Whether the compiler writes a power as products or roots."""
    if not isinstance(exponent, int | float):
        return False
    return exponent == 0.5 or (exponent == int(exponent) and abs(exponent) < _LARGEST_POWER)
