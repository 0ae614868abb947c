"""`specstep::tree_layout` as an ONNX function."""

from onnxscript import BOOL, INT32, INT64, script
from onnxscript import opset18 as op

from ..bits_onnx import pack_bits
from ..onnx_domain import OPS


@script(OPS, default_opset=op)
def tree_layout(parents: INT64, valid: BOOL) -> tuple[INT32, INT64]:
    """See `reference.tree_layout`."""
    count = op.Shape(parents, start=1, end=2)
    node = op.Range(0, op.Squeeze(count), 1)  # [T]
    column = op.Unsqueeze(node, [1])
    linked = op.And(op.And(valid, parents >= 0), parents < node)
    jump = op.Where(linked, parents, node)
    square = op.Concat(op.Shape(parents), count, axis=0)  # B, T, T
    itself = op.Expand(node == column, square)
    ancestor = op.Cast(itself, to=INT64.dtype)
    steps = op.Cast(op.Constant(value_ints=[1]), to=INT64.dtype)
    go_on = op.Squeeze(steps < count)
    while go_on:  # pointer jumping: knows 2**k ancestors after k rounds
        indices = op.Expand(op.Unsqueeze(jump, [2]), square)
        ancestor = op.Max(ancestor, op.GatherElements(ancestor, indices, axis=1))
        jump = op.GatherElements(jump, jump, axis=1)
        steps = steps * 2
        go_on = op.Squeeze(steps < count)

    in_tree = jump == 0
    packed = op.Or(op.And(ancestor > 0, op.Unsqueeze(in_tree, [2])), itself)
    depths = op.ReduceSum(op.Cast(packed, to=INT64.dtype), [-1], keepdims=0) - 1
    return pack_bits(packed), depths
