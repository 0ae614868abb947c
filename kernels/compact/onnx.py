"""`specstep::compact` as an ONNX function: of one cache, which it returns anew, since ONNX has no writes in place."""

from onnxscript import INT64, script
from onnxscript import opset18 as op

from ..onnx_domain import OPS


@script(OPS, default_opset=op)
def compact(cache, lengths: INT64, path: INT64, accepted: INT64):
    """See `reference.compacted`."""
    slots = op.Shape(cache, start=2, end=3)
    moved = op.Slice(path, [1], op.Shape(path, start=1, end=2), [1])  # [B, P - 1]
    depth = op.Range(1, op.Squeeze(op.Shape(path, start=1, end=2)), 1)
    start = op.Unsqueeze(lengths, [1])
    source, target = start + moved, start + depth
    moving = op.And(depth <= op.Unsqueeze(accepted, [1]), op.And(moved > depth, op.And(start >= 0, source < slots)))
    target = op.Max(op.Min(target, slots - 1), 0)
    source = op.Where(moving, source, target)

    size = op.Shape(cache, start=3, end=4)
    shape = op.Concat(op.Shape(cache, start=0, end=2), op.Shape(depth), size, axis=0)  # B, H, P - 1, D
    taken = op.GatherElements(cache, op.Expand(op.Unsqueeze(source, [1, 3]), shape), axis=2)
    return op.ScatterElements(cache, op.Expand(op.Unsqueeze(target, [1, 3]), shape), taken, axis=2)
