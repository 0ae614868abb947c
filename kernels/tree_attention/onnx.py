"""`specstep::tree_attention` as an ONNX function."""

from math import inf
from typing import Any

from onnxscript import FLOAT, INT32, INT64, script
from onnxscript import opset18 as op

from ..bits_onnx import unpack_bits
from ..onnx_domain import OPS, Float, write_node


@script(OPS, default_opset=op)
def tree_attention(
    q: Float,
    k: Float,
    v: Float,
    lengths: INT64,
    depths: INT64,
    ancestors: INT32,
    key_depths: INT64,
    sinks: FLOAT,
    scale: float,
    window: int,
    softcap: float,
) -> Float:
    """See `reference.tree_attention`. sinks [H] is always given, -inf where the model has none.

    What does not depend on q, k and v comes first: all layers of a pass share it. Logits are [B, H, T, S] here, and
    the products' operands and results [B, H_kv, G * T, ...].
    """
    nodes, keys = op.Shape(depths, start=1, end=2), op.Shape(key_depths, start=1, end=2)
    tree = unpack_bits(ancestors, keys)  # [B, T, M]
    depth = op.Unsqueeze(depths, [2])
    if op.Constant(value_int=window) > 0:
        near = op.And(tree, depth - op.Unsqueeze(key_depths, [1]) < window)
    else:
        near = op.Identity(tree)
    # Whether a query sees a committed slot, each tree key, a slot after the tree: [B, 1, T, 1 + M + 1].
    seen = op.Pad(op.Cast(op.Unsqueeze(near, [1]), to=FLOAT.dtype), [0, 0, 0, 1, 0, 0, 0, 0], 1.0)
    masks = op.Log(op.Pad(seen, [0, 0, 0, 0, 0, 0, 0, 1], 0.0))  # 0 or -inf
    length = op.Unsqueeze(op.Max(lengths, 0), [1, 2, 3])
    per_node = op.Concat([1, 1], nodes, [1], axis=0)
    sink = op.Unsqueeze(op.Max(sinks, -3.4028234663852886e38), [0, 2, 3])  # finite: a query that sees nothing gets 0
    sink = op.Expand(sink, op.Concat(op.Shape(depths, start=0, end=1), [1], nodes, [1], axis=0))
    per_head = op.Concat([0, -1], nodes, [0], axis=0)

    slot = op.Range(0, op.Squeeze(op.Shape(k, start=2, end=3)), 1)
    place = op.Clip(slot + (1 - length), 0, op.Squeeze(keys) + 1)  # [B, 1, 1, S], an index to `masks`
    mask = op.GatherElements(masks, op.Expand(place, per_node), axis=3)
    if op.Constant(value_int=window) > 0:
        near = op.Or(slot > length + op.Unsqueeze(depth, [1]) - window, place > 0)
        mask = mask + op.Log(op.Cast(near, to=FLOAT.dtype))
    else:
        mask = op.Identity(mask)
    grouped = op.Concat([0], op.Shape(k, start=1, end=2), [-1, 0], axis=0)
    # As `reference.split_scale`: q times a power of 2 close to the scale, and the logits times what is left of it.
    factor = op.Constant(value_float=scale)
    exponent = op.Floor(op.Log(op.Max(factor, 1e-30)) / 0.6931471805599453)
    power = op.Pow(2.0, exponent)
    rows = op.Reshape(q * op.CastLike(power, q), grouped)
    logits = op.MatMul(rows, op.Transpose(k, perm=[0, 1, 3, 2]))
    # No quotient: ONNX Runtime 1.32 fuses that of a scale of 1 with the product, and loses the cast between them.
    logits = op.Cast(logits, to=FLOAT.dtype) * (factor * op.Pow(2.0, -exponent))
    if op.Constant(value_float=softcap) > 0.0:  # noqa: SIM108 (an ONNX If)
        capped = op.Tanh(logits / softcap) * softcap
    else:
        capped = op.Identity(logits)
    masked = op.Where(mask == 0.0, op.Reshape(capped, per_head), mask)  # no sum: it would hand on NaN of an unseen slot
    capped = op.Concat(masked, sink, axis=3)
    weights = op.Slice(op.Softmax(capped), [0], [-1], [3])
    mixed = op.MatMul(op.Reshape(op.CastLike(weights, v), grouped), v)  # [B, H_kv, G * T, DV]
    return op.Transpose(op.Reshape(mixed, per_head), perm=[0, 2, 1, 3])


def tree_attention_node(
    q: Any, k: Any, v: Any, lengths: Any, depths: Any, ancestors: Any, key_depths: Any,
    scale: float, window: int = 0, softcap: float = 0.0, sinks: Any = None,
) -> Any:  # fmt: skip
    """The node that stands for a call of the torch op, whose sinks may be None."""
    sinks = op.Constant(value_floats=[-inf] * q.shape[1]) if sinks is None else op.Cast(sinks, to=FLOAT.dtype)
    inputs = (q, k, v, lengths, depths, ancestors, key_depths, sinks)
    return write_node(tree_attention, *inputs, scale=scale, window=window, softcap=softcap)
