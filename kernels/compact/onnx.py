"""`specstep::compact` as an ONNX function: of one cache, which it returns anew, since ONNX has no writes in place."""

from onnxscript import INT64, script
from onnxscript import opset18 as op

from ..onnx_domain import OPS, Float


@script(OPS, default_opset=op)
def compact(cache: Float, lengths: INT64, path: INT64, accepted: INT64) -> Float:
    """See `reference.compacted`. What does not depend on the cache comes first: all caches of a step share it."""
    depth = op.Range(1, op.Squeeze(op.Shape(path, start=1, end=2)), 1)
    moved = op.Slice(path, [1], op.Shape(path, start=1, end=2), [1])  # [B, P - 1]
    start = op.Unsqueeze(lengths, [1])
    moving = op.And(op.And(depth <= op.Unsqueeze(accepted, [1]), moved > depth), start >= 0)
    target = op.Max(start + depth, 0)
    source = op.Unsqueeze(op.Where(moving, start + moved, target), [1, 3])  # [B, 1, P - 1, 1]
    target = op.Unsqueeze(target, [1, 3])

    slots = op.Shape(cache, start=2, end=3)
    target = op.Min(target, slots - 1)
    source = op.Where(source < slots, source, target)
    shape = op.Where(op.Constant(value_ints=[0, 0, 1, 0]) == 1, 1, op.Shape(cache))  # B, H, 1, D
    taken = op.GatherElements(cache, op.Expand(source, shape), axis=2)
    return op.ScatterElements(cache, op.Expand(target, shape), taken, axis=2)
