"""`specstep::wkv` as ONNX functions, one for trees and one for chains, which keep one state."""

from typing import Any

from onnxscript import FLOAT, INT64, graph, script
from onnxscript import opset18 as op

from ..onnx_domain import OPS, write_node


@script(OPS, default_opset=op)
def wkv_token(k: FLOAT, v: FLOAT, decay: FLOAT, first: FLOAT, before: FLOAT) -> tuple[FLOAT, FLOAT]:
    """One token: k, v [B, C], before [B, 3, C] -> out [B, C], and the state after it."""
    a, b, exponent = op.Split(before, axis=1, num_outputs=3)  # [B, 1, C] each
    key = op.Unsqueeze(k, [1])
    value = op.Unsqueeze(v, [1])
    p = op.Where(op.Equal(b, 0.0), -1e38, exponent)
    own = first + key
    now = op.Max(p, own)
    kept = op.Exp(p - now)
    added = op.Exp(own - now)
    out = (kept * a + added * value) / (kept * b + added)
    later = p + decay
    next = op.Max(later, key)
    kept_on = op.Exp(later - next)
    added_on = op.Exp(key - next)
    after = op.Concat(kept_on * a + added_on * value, kept_on * b + added_on, next, axis=1)
    return op.Squeeze(out, [1]), after


@script(OPS, default_opset=op)
def wkv_chain(key: FLOAT, value: FLOAT, decay: FLOAT, first: FLOAT, state: FLOAT) -> tuple[FLOAT, FLOAT]:
    """See `reference.wkv`."""

    @graph()
    def token(before, k, v):
        out, after = wkv_token(k, v, decay, first, before)
        left = op.Identity(after)
        return after, out, left

    _, out, states = op.Scan(
        state, key, value, body=token, num_scan_inputs=2, scan_input_axes=[1, 1], scan_output_axes=[1, 1]
    )
    return out, states


@script(OPS, default_opset=op)
def wkv(key: FLOAT, value: FLOAT, decay: FLOAT, first: FLOAT, state: FLOAT, parents: INT64) -> tuple[FLOAT, FLOAT]:
    """As `wkv_chain`, over a tree: each token takes the state of its parent [B, T]."""

    @graph()
    def token(states, k, v, parent, place):
        before = op.GatherND(states, op.Unsqueeze(parent + 1, [1]), batch_dims=1)  # [B, 3, C]
        out, after = wkv_token(k, v, decay, first, before)
        own = op.Reshape(
            op.Equal(op.Range(0, op.Squeeze(op.Shape(states, start=1, end=2)), 1), place + 1), [1, -1, 1, 1]
        )
        return op.Where(own, op.Unsqueeze(after, [1]), states), out

    count = op.Shape(key, start=1, end=2)
    rest = op.Concat(op.Shape(state, start=0, end=1), count, op.Shape(state, start=1, end=3), axis=0)
    states = op.Concat(op.Unsqueeze(state, [1]), op.Expand(op.Constant(value_float=0.0), rest), axis=1)
    places = op.Range(0, op.Squeeze(count), 1)
    filled, out = op.Scan(
        states, key, value, parents, places, body=token, num_scan_inputs=4, scan_input_axes=[1, 1, 1, 0],
        scan_output_axes=[1],
    )  # fmt: skip
    return out, op.Slice(filled, [1], op.Constant(value_ints=[9223372036854775807]), [1])


def wkv_nodes(key: Any, value: Any, decay: Any, first: Any, state: Any, parents: Any) -> tuple[Any, Any]:
    """The nodes of a call of the op."""
    given = key, value, decay, first, state
    return write_node(wkv_chain, *given) if parents is None else write_node(wkv, *given, parents)
