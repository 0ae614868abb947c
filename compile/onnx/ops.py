"""Our ops in ONNX: torch's calls become nodes of domain `specstep`, and a function in the file defines each of them.

ONNX Runtime inlines the functions. A node's attributes also name the TensorRT plugin that may take its place.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import onnx
import onnx_ir
import torch
from onnx import helper
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import core
from onnxscript.values import OnnxFunction

from ...kernels.accept.onnx import accept
from ...kernels.accept.op import accept as accept_op
from ...kernels.bits_onnx import only_allowed, pack_bits, unpack_bits
from ...kernels.choose.onnx import HELPERS as CHOOSE_HELPERS
from ...kernels.choose.onnx import choose
from ...kernels.choose.op import choose as choose_op
from ...kernels.compact.onnx import compact
from ...kernels.compact.op import compacted as compacted_op
from ...kernels.expert_linear.onnx import expert_linear, expert_linear_node
from ...kernels.expert_linear.op import expert_linear as expert_linear_op
from ...kernels.fold.onnx import fold, fold_node
from ...kernels.fold.op import folded as folded_op
from ...kernels.linear_attention.onnx import (
    linear_attention,
    linear_attention_chain,
    linear_attention_nodes,
    spread_heads,
)
from ...kernels.linear_attention.op import linear_attention as linear_attention_op
from ...kernels.ngram.onnx import ngram_nodes
from ...kernels.ngram.op import ngram as ngram_op
from ...kernels.noise_onnx import HELPERS as NOISE_HELPERS
from ...kernels.onnx_domain import OPS, write_node
from ...kernels.rank.onnx import HELPERS as RANK_HELPERS
from ...kernels.rank.onnx import rank
from ...kernels.rank.op import rank as rank_op
from ...kernels.shift.onnx import shift
from ...kernels.shift.op import shifted as shifted_op
from ...kernels.top_log_probs.onnx import top_log_probs, top_log_probs_node
from ...kernels.top_log_probs.op import top_log_probs as top_log_probs_op
from ...kernels.tree_attention.onnx import tree_attention, tree_attention_node
from ...kernels.tree_attention.op import tree_attention as tree_attention_op
from ...kernels.tree_layout.onnx import tree_layout
from ...kernels.tree_layout.op import tree_layout as tree_layout_op
from ...kernels.wkv.onnx import wkv, wkv_chain, wkv_nodes, wkv_token
from ...kernels.wkv.op import wkv as wkv_op

DOMAIN = OPS.domain
INDEX_TYPES = (onnx_ir.DataType.INT64, onnx_ir.DataType.INT32)
PLUGIN_ATTRIBUTES = {"plugin_namespace": DOMAIN, "plugin_version": str(OPS.version), "aot": 1}
NODES = (
    tree_layout, tree_attention, linear_attention, linear_attention_chain, wkv, wkv_chain, accept, compact, fold, shift,
    expert_linear, choose, top_log_probs, rank,
)  # fmt: skip
HELPERS = (  # that the nodes' functions call
    pack_bits, unpack_bits, spread_heads, wkv_token, only_allowed, *NOISE_HELPERS, *CHOOSE_HELPERS, *RANK_HELPERS,
)  # fmt: skip


def add_functions(model: onnx.ModelProto) -> None:
    """Give a model with nodes of the domain the functions, and its nodes the plugins' attributes."""
    attributes = [helper.make_attribute(name, value) for name, value in PLUGIN_ATTRIBUTES.items()]
    for node in model.graph.node:
        if node.domain == DOMAIN:
            node.attribute.extend(attributes)
    for function in NODES:
        proto = _function(function)
        proto.attribute_proto.extend(attributes)
        model.functions.append(proto)
    model.functions.extend(map(_function, HELPERS))


def _function(function: OnnxFunction) -> onnx.FunctionProto:
    """A function as a file holds it. onnxscript does not see the domain of a call inside an If."""
    proto = function.to_function_proto()
    if DOMAIN not in [opset.domain for opset in proto.opset_import]:
        proto.opset_import.append(helper.make_opsetid(DOMAIN, OPS.version))
    return proto


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """torch op -> the function that writes its ONNX nodes, for `torch.onnx.export`."""
    return {
        tree_layout_op._opoverload: _node(tree_layout),
        tree_attention_op._opoverload: tree_attention_node,
        accept_op._opoverload: _node(accept),
        compacted_op._opoverload: _node(compact),
        linear_attention_op._opoverload: linear_attention_nodes,
        folded_op._opoverload: fold_node,
        wkv_op._opoverload: wkv_nodes,
        shifted_op._opoverload: _node(shift),
        expert_linear_op._opoverload: expert_linear_node,
        choose_op._opoverload: _node(choose),
        top_log_probs_op._opoverload: top_log_probs_node,
        rank_op._opoverload: _node(rank),
        ngram_op._opoverload: ngram_nodes,
        torch.ops.aten.linear.default: _linear,
        torch.ops.aten.index.Tensor: _index,
        torch.ops.aten.index_put.default: _index_put,
        torch.ops.aten.floor_divide.default: _floor_divide,
        torch.ops.aten.remainder.Scalar: _remainder,
    }


def _node(function: OnnxFunction) -> Callable[..., Any]:
    """What writes the node of a torch op whose arguments are those of the ONNX function."""

    def write(*inputs: Any) -> Any:
        return write_node(function, *inputs)

    return write


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """weight [N, K] times x^T [K, rows]: as the left operand, ONNX Runtime reads a weight as it is stored, once for all
    rows. As the right one it would be packed, on each call or into a second copy (8 rows: 0.16 ms, against 0.32 ms or
    0.20 ms, for 3.5 MB). A single token per row is better off with the packed copy (a whole step: 22 ms, 40 ms), which
    costs its memory: a draft model, whose chain and catch-up read the same weights, holds them twice."""
    width, depth = weight.shape
    rows = op.Reshape(x, op.Constant(value_ints=[-1, depth]))
    if list(x.shape)[-2:-1] in ([], [1]):
        out = op.Gemm(rows, weight, transB=1)
    else:
        out = op.Transpose(op.MatMul(weight, op.Transpose(rows, perm=[1, 0])), perm=[1, 0])
    if bias is not None:
        out = op.Add(out, bias)
    leading = [n if isinstance(n, int) else -1 for n in x.shape[:-1]]
    if leading.count(-1) <= 1:
        return op.Reshape(out, op.Constant(value_ints=[*leading, width]))
    return op.Reshape(out, op.Concat(op.Shape(x, start=0, end=-1), op.Constant(value_ints=[width]), axis=0))


def _index(x: Any, indices: Sequence[Any]) -> Any:
    """Rows of a table: one Gather. The exporter's own takes five nodes."""
    if len(indices) > 1 or indices[0] is None or indices[0].dtype not in INDEX_TYPES:
        return core.aten_index(x, indices)
    return op.Gather(x, indices[0], axis=0)


def _index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """A write to a cache: one ScatterND. The exporter's own goes through transposes that move nothing, and expands
    values that have their shape already."""
    integers = all(index is not None and index.dtype == onnx_ir.DataType.INT64 for index in indices)
    if accumulate or not integers or not _same(values.shape, [*_broadcast(indices), *x.shape[len(indices) :]]):
        return core.aten_index_put(x, indices, values, accumulate)
    shape = op.Shape(functools.reduce(op.Add, indices))
    return op.ScatterND(x, op.Concat(*(op.Unsqueeze(op.Expand(i, shape), [-1]) for i in indices), axis=-1), values)


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Two shapes of which both are known are the same."""
    known = all(getattr(size, "value", size) is not None for size in (*one, *other))
    return known and list(one) == list(other)


def _broadcast(tensors: Sequence[Any]) -> list[Any]:
    """The shape that tensors broadcast to."""
    rank = max(len(tensor.shape) for tensor in tensors)
    padded = [[1] * (rank - len(tensor.shape)) + list(tensor.shape) for tensor in tensors]
    return [next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True)]


def _floor_divide(x: Any, divisor: Any) -> Any:
    """Integers, in three nodes; the exporter's own takes eight."""
    if x.dtype not in INDEX_TYPES:
        return core.aten_floor_divide(x, divisor)
    return op.Div(op.Sub(x, op.Mod(x, divisor)), divisor)


def _remainder(x: Any, divisor: Any) -> Any:
    """The exporter's own takes no divisor that depends on a shape."""
    if x.dtype not in INDEX_TYPES:
        return core.aten_remainder(x, divisor)
    return op.Mod(x, op.CastLike(divisor, x))
