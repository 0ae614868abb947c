"""`specstep::tree_attention` as an ONNX function."""

from onnxscript import FLOAT, INT32, INT64, script
from onnxscript import opset18 as op

from ..onnx_domain import OPS
from ..tree_layout.onnx import unpack_bits


@script(OPS, default_opset=op)
def tree_attention(
    q,
    k,
    v,
    lengths: INT64,
    depths: INT64,
    ancestors: INT32,
    key_depths: INT64,
    sinks: FLOAT,
    scale: float,
    window: int,
    softcap: float,
):
    """See `op.tree_attention`. sinks [H] is always given, -inf where the model has none."""
    slots = op.Shape(k, start=2, end=3)
    length = op.Unsqueeze(op.Max(op.Min(lengths, slots), 0), [1, 2])
    slot = op.Range(0, op.Squeeze(slots) + 1, 1)  # one more, for tree keys beyond the cache
    keys = op.Shape(key_depths, start=1, end=2)
    tree = unpack_bits(ancestors, keys)  # [B, T, M]
    committed = slot < length  # [B, 1, S + 1]
    if op.Constant(value_int=window) > 0:
        depth = op.Unsqueeze(depths, [2])
        seen = op.And(committed, slot > length + depth - window)
        near = op.And(tree, depth - op.Unsqueeze(key_depths, [1]) < window)
    else:
        seen = op.Identity(committed)
        near = op.Identity(tree)
    tree_shape = op.Shape(near)
    place = op.Min(length + op.Range(0, op.Squeeze(keys), 1), slots)
    seen = op.Expand(seen, op.Concat(op.Shape(depths), [1], axis=0))
    visible = op.ScatterElements(seen, op.Expand(place, tree_shape), near, axis=2)
    visible = op.Slice(visible, [0], slots, [2])  # [B, T, S]

    kv_heads = op.Shape(k, start=1, end=2)
    groups = op.Shape(q, start=1, end=2) / kv_heads
    batch, nodes = op.Shape(q, start=0, end=1), op.Shape(q, start=2, end=3)
    rows = op.Reshape(q, op.Concat(batch, kv_heads, [-1], op.Shape(q, start=3, end=4), axis=0))
    scores = op.Cast(op.MatMul(rows, op.Transpose(k, perm=[0, 1, 3, 2])), to=FLOAT.dtype) * scale
    if op.Constant(value_float=softcap) > 0.0:  # noqa: SIM108 (an ONNX If)
        capped = op.Tanh(scores / softcap) * softcap
    else:
        capped = op.Identity(scores)
    capped = op.Reshape(capped, op.Concat(batch, kv_heads, groups, nodes, slots, axis=0))
    capped = op.Where(op.Unsqueeze(visible, [1, 2]), capped, op.Constant(value_float=float("-inf")))

    sink = op.Reshape(sinks, op.Concat([1], kv_heads, groups, [1, 1], axis=0))
    peak = op.Max(op.ReduceMax(capped, [-1]), sink, -3.4028234663852886e38)
    weights = op.Exp(capped - peak)  # [B, H_kv, G, T, S]
    total = op.Max(op.ReduceSum(weights, [-1]) + op.Exp(sink - peak), 1e-30)
    grouped = op.Concat(batch, kv_heads, groups * nodes, [-1], axis=0)
    mixed = op.MatMul(op.CastLike(op.Reshape(weights, grouped), v), v)  # [B, H_kv, G * T, D]
    out = op.CastLike(op.Cast(mixed, to=FLOAT.dtype) / op.Reshape(total, grouped), q)
    out = op.Reshape(out, op.Concat(batch, op.Shape(q, start=1, end=2), nodes, [-1], axis=0))
    return op.Transpose(out, perm=[0, 2, 1, 3])
