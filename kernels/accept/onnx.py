"""`specstep::accept` as an ONNX function."""

from onnxscript import BOOL, INT32, INT64, script
from onnxscript import opset18 as op

from ..bits_onnx import unpack_bits
from ..onnx_domain import OPS


@script(OPS, default_opset=op)
def accept(
    tokens: INT64, parents: INT64, valid: BOOL, ancestors: INT32, depths: INT64, choice: INT64, max_depth: int
) -> tuple[INT64, INT64]:
    """See `reference.accept`."""
    count = op.Shape(tokens, start=1, end=2)
    node = op.Range(0, op.Squeeze(count), 1)  # [T]
    ancestor = unpack_bits(ancestors, count)  # [B, T, T]

    wanted = op.GatherElements(choice, op.Max(op.Min(parents, count - 1), 0), axis=1)
    agrees = op.And(op.And(valid, parents >= 0), op.And(parents < node, tokens == wanted))
    agrees = op.Or(agrees, node == 0)
    fine = op.Cast(op.Or(op.Unsqueeze(agrees, [1]), op.Not(ancestor)), to=INT64.dtype)
    in_tree = op.Squeeze(op.Slice(ancestor, [0], [1], [2]), [2])
    accepted = op.And(op.And(in_tree, op.ReduceMin(fine, [-1], keepdims=0) > 0), depths <= max_depth)

    key = op.Where(accepted, depths * count + (count - 1 - node), -1)  # deepest first, then the lowest index
    best = count - 1 - op.Mod(op.ReduceMax(key, [1], keepdims=1), count)  # [B, 1]; the root is always accepted
    length = op.GatherElements(depths, best, axis=1)

    on_path = op.Unsqueeze(op.GatherND(ancestor, best, batch_dims=1), [1])  # [B, 1, T]
    level = op.Range(0, op.Constant(value_int=max_depth) + 1, 1)  # [P]
    at_level = op.And(on_path, op.Unsqueeze(depths, [1]) == op.Unsqueeze(level, [1]))  # [B, P, T]
    path = op.ReduceSum(op.Where(at_level, node, 0), [-1], keepdims=0)
    path = op.Where(level <= length, path, op.Min(level, count - 1))
    return path, op.Squeeze(length, [1])
