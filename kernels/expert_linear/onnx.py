"""`specstep::expert_linear` as an ONNX function."""

from typing import Any

from onnxscript import INT64, script
from onnxscript import opset18 as op

from ..onnx_domain import OPS, Float, write_node


@script(OPS, default_opset=op)
def expert_linear(x: Float, weight: Float, experts: INT64, transB: int) -> Float:
    """See `reference.expert_linear`. A turn of the loop for each expert in use, with all of its rows. transB is that of
    Gemm: 1 where weight is [E, N, K]."""
    if op.Constant(value_int=transB) > 0:
        columns = op.Shape(weight, start=1, end=2)
    else:
        columns = op.Shape(weight, start=2, end=3)
    out = op.Expand(op.CastLike(0.0, x), op.Concat(op.Shape(x, start=0, end=1), columns, axis=0))
    used, _first, _inverse, _counts = op.Unique(experts, sorted=1)
    for turn in range(op.Squeeze(op.Shape(used))):
        expert = op.Gather(used, turn)
        rows = op.Squeeze(op.NonZero(experts == expert), [0])
        product = op.Gemm(op.Gather(x, rows), op.Gather(weight, expert), transB=transB)
        out = op.ScatterND(out, op.Unsqueeze(rows, [1]), product)
    return out


def expert_linear_node(x: Any, weight: Any, experts: Any, transposed: bool) -> Any:
    """The node that stands for a call of the torch op."""
    return write_node(expert_linear, x, weight, experts, transB=int(not transposed))
