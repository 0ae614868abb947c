"""`specstep::linear_attention` as ONNX functions, one for trees and one for chains, which keep one state."""

from typing import Any

from onnxscript import FLOAT, INT64, graph, script
from onnxscript import opset18 as op

from ..onnx_domain import OPS, write_node


@script(OPS, default_opset=op)
def spread_heads(key: FLOAT, value: FLOAT) -> FLOAT:
    """Keys [B, T, G, N] -> [B, T, H, N], those of each of the value's heads."""
    groups = op.Shape(key, start=2, end=3)
    times = op.Div(op.Shape(value, start=2, end=3), groups)
    rows = op.Shape(key, start=0, end=2)
    wide = op.Expand(op.Unsqueeze(key, [3]), op.Concat(rows, groups, times, op.Shape(key, start=3, end=4), axis=0))
    return op.Reshape(wide, op.Concat(rows, op.Shape(value, start=2, end=3), op.Shape(key, start=3, end=4), axis=0))


@script(OPS, default_opset=op)
def linear_attention_chain(
    query: FLOAT, key: FLOAT, value: FLOAT, decay: FLOAT, scale: FLOAT, correction: FLOAT, state: FLOAT
) -> tuple[FLOAT, FLOAT]:
    """See `reference.linear_attention`: decay [B, T, H, N or 1, P or 1], see `factors`; u = scale [B, T, H] (value -
    correction S^T key); correction is 0 or 1."""

    @graph()
    def token(before, q, k, v, d, s):
        decayed = before * d
        read = op.ReduceSum(decayed * op.Unsqueeze(k, [3]), [2], keepdims=0)
        u = (v - op.Mul(correction, read)) * op.Unsqueeze(s, [2])
        after = decayed + op.Unsqueeze(k, [3]) * op.Unsqueeze(u, [2])
        out = op.ReduceSum(after * op.Unsqueeze(q, [3]), [2], keepdims=0)
        return after, out, u

    q = spread_heads(query, value)
    k = spread_heads(key, value)
    _, out, u = op.Scan(
        state, q, k, value, decay, scale, body=token, num_scan_inputs=5, scan_input_axes=[1, 1, 1, 1, 1],
        scan_output_axes=[1, 1],
    )  # fmt: skip
    return out, u


@script(OPS, default_opset=op)
def linear_attention(
    query: FLOAT, key: FLOAT, value: FLOAT, decay: FLOAT, scale: FLOAT, correction: FLOAT, state: FLOAT,
    parents: INT64,
) -> tuple[FLOAT, FLOAT]:  # fmt: skip
    """As `linear_attention_chain`, over a tree: each token takes the state of its parent [B, T]."""

    @graph()
    def token(states, q, k, v, d, s, parent, place):
        before = op.GatherND(states, op.Unsqueeze(parent + 1, [1]), batch_dims=1)  # [B, H, N, P]
        decayed = before * d
        read = op.ReduceSum(decayed * op.Unsqueeze(k, [3]), [2], keepdims=0)
        u = (v - op.Mul(correction, read)) * op.Unsqueeze(s, [2])
        after = decayed + op.Unsqueeze(k, [3]) * op.Unsqueeze(u, [2])
        out = op.ReduceSum(after * op.Unsqueeze(q, [3]), [2], keepdims=0)
        own = op.Reshape(
            op.Equal(op.Range(0, op.Squeeze(op.Shape(states, start=1, end=2)), 1), place + 1), [1, -1, 1, 1, 1]
        )
        return op.Where(own, op.Unsqueeze(after, [1]), states), out, u

    q = spread_heads(query, value)
    k = spread_heads(key, value)
    count = op.Shape(value, start=1, end=2)
    first = op.Unsqueeze(state, [1])
    rest = op.Concat(op.Shape(state, start=0, end=1), count, op.Shape(state, start=1, end=4), axis=0)
    states = op.Concat(first, op.Expand(op.Constant(value_float=0.0), rest), axis=1)
    places = op.Range(0, op.Squeeze(count), 1)
    _, out, u = op.Scan(
        states, q, k, value, decay, scale, parents, places, body=token, num_scan_inputs=7,
        scan_input_axes=[1, 1, 1, 1, 1, 1, 0], scan_output_axes=[1, 1],
    )  # fmt: skip
    return out, u


def factors(decay: Any, rates: Any) -> Any:
    """The nodes of what the states of all tokens are multiplied with, [B, T, H, N or 1, P or 1]."""
    if rates is None:
        return op.Unsqueeze(decay, op.Constant(value_ints=[4]))
    return op.Exp(op.Mul(op.Unsqueeze(decay, op.Constant(value_ints=[3])), rates))


def linear_attention_nodes(
    query: Any, key: Any, value: Any, decay: Any, rates: Any, beta: Any, state: Any, parents: Any
) -> tuple[Any, Any]:
    """The nodes of a call of the op."""
    if beta is None:
        scale = op.Expand(op.Constant(value_float=1.0), op.Shape(value, start=0, end=3))
        correction = op.Constant(value_float=0.0)
    else:
        scale, correction = beta, op.Constant(value_float=1.0)
    given = query, key, value, factors(decay, rates), scale, correction, state
    if parents is None:
        return write_node(linear_attention_chain, *given)
    return write_node(linear_attention, *given, parents)
