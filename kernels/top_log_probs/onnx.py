"""`specstep::top_log_probs` as an ONNX function."""

from math import inf
from typing import Any

from onnx import TensorProto, helper
from onnxscript import FLOAT, INT32, INT64, script
from onnxscript import opset18 as op

from ..bits_onnx import only_allowed
from ..noise_onnx import gumbel
from ..onnx_domain import OPS, Float, write_node

ALL = helper.make_tensor("all", TensorProto.INT32, [1], [-1])


@script(OPS, default_opset=op)
def top_log_probs(
    logits: Float,
    nodes: INT64,
    wanted: INT64,
    temperature: FLOAT,
    seeds: INT64,
    positions: INT64,
    ids: INT64,
    top: int,
    allowed: INT32,
    masked: INT64,
) -> tuple[INT64, FLOAT, FLOAT]:
    """See `reference.top_log_probs`. ids and the mask are always given. The first branch of each If holds for any
    input."""
    asked = op.Unsqueeze(wanted, [1]) != 0
    places = op.Concat(op.Shape(nodes), op.Unsqueeze(op.Constant(value_int=top), [0]), axis=0)  # B, P, top
    if op.ReduceMax(op.Abs(wanted), keepdims=0) > 0:
        at = op.Unsqueeze(nodes, [2])
        own = op.Cast(op.GatherND(logits, at, batch_dims=1), to=FLOAT.dtype)
        if op.ReduceMax(op.Abs(masked), keepdims=0) > 0:
            x = only_allowed(own, op.GatherND(allowed, at, batch_dims=1), masked)
        else:
            x = op.Identity(own)
        highest = op.Max(op.ReduceMax(x, [-1], keepdims=1), -3.4028234663852886e38)
        sums = highest + op.Log(op.ReduceSum(op.Exp(x - highest), [-1], keepdims=1))
        if op.ReduceMax(op.Where(wanted != 0, temperature, 0.0), keepdims=0) > 0.0:
            heat = op.Unsqueeze(temperature, [1, 2])
            noise = gumbel(op.Unsqueeze(seeds, [1, 2]), op.Unsqueeze(positions, [2]), ids)
            key = op.Where(heat > 0.0, x + heat * noise, x)
        else:
            key = op.Identity(x)
        _keys, best = op.TopK(key, op.Min(op.Shape(x, start=2, end=3), op.Slice(places, [2], [3])))
        missing = op.Concat([0, 0, 0, 0, 0], op.Slice(places, [2], [3]) - op.Shape(best, start=2, end=3), axis=0)
        found = op.Pad(op.GatherElements(x, best, axis=2) - sums, missing, -inf)
        tokens = op.Where(op.Unsqueeze(asked, [2]), op.Pad(op.Gather(ids, best), missing), 0)
        log_probs = op.Where(op.Unsqueeze(asked, [2]), found, -inf)
        total = op.Where(asked, op.Squeeze(sums, [2]), 0.0)
    else:
        tokens = op.Expand(op.Cast(0, to=INT64.dtype), places)
        log_probs = op.Expand(-inf, places)
        total = op.Expand(0.0, op.Shape(nodes))
    return tokens, log_probs, total


def top_log_probs_node(
    logits: Any,
    nodes: Any,
    wanted: Any,
    temperature: Any,
    seeds: Any,
    positions: Any,
    ids: Any,
    top: int,
    allowed: Any = None,
    masked: Any = None,
) -> Any:
    """The node that stands for a call of the torch op, whose ids and mask may be None."""
    ids = op.Range(0, op.Squeeze(op.Shape(logits, start=2, end=3)), 1) if ids is None else ids
    if allowed is None:
        words = (op.Shape(logits, start=2, end=3) + 31) / 32
        shape = op.Concat(op.Shape(logits, start=0, end=2), words, axis=0)
        allowed, masked = op.ConstantOfShape(shape, value=ALL), op.Sub(wanted, wanted)
    inputs = (logits, nodes, wanted, temperature, seeds, positions, ids, allowed, masked)
    return write_node(top_log_probs, *inputs, top=top)
