"""`specstep::shifted` as an ONNX function."""

from onnxscript import INT64, script
from onnxscript import opset18 as op

from ..onnx_domain import OPS, Float


@script(OPS, default_opset=op)
def shift(window: Float, inputs: Float, path: INT64, count: INT64) -> Float:
    """See `reference.shifted`."""
    size = op.Shape(window, start=1, end=2)
    place = op.Unsqueeze(count, [1]) + op.Range(0, op.Squeeze(size), 1)
    on_path = op.Max(op.Min(place - size, op.Shape(path, start=1, end=2) - 1), 0)
    token = op.GatherElements(path, on_path, axis=1)
    token = op.Max(op.Min(token, op.Shape(inputs, start=1, end=2) - 1), 0)
    index = op.Where(place < size, place, token + size)
    return op.GatherND(op.Concat(window, inputs, axis=1), op.Unsqueeze(index, [2]), batch_dims=1)
