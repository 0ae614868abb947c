"""`specstep::folded` as an ONNX function."""

from typing import Any

from onnxscript import FLOAT, INT64, graph, script
from onnxscript import opset18 as op

from ..linear_attention.onnx import factors, spread_heads
from ..onnx_domain import OPS, write_node


@script(OPS, default_opset=op)
def fold(state: FLOAT, key: FLOAT, decay: FLOAT, update: FLOAT, path: INT64, count: INT64) -> FLOAT:
    """See `reference.folded`; decay as `factors` has it."""

    @graph()
    def token(before, k, d, u, kept):
        after = before * d + op.Unsqueeze(k, [3]) * op.Unsqueeze(u, [2])
        return op.Where(op.Reshape(kept, [-1, 1, 1, 1]), after, before)

    last = op.Shape(update, start=1, end=2) - 1
    index = op.Unsqueeze(op.Max(op.Min(path, last), 0), [2])
    keys = op.GatherND(spread_heads(key, update), index, batch_dims=1)
    decays = op.GatherND(decay, index, batch_dims=1)
    updates = op.GatherND(update, index, batch_dims=1)
    place = op.Range(0, op.Squeeze(op.Shape(path, start=1, end=2)), 1)
    kept = op.Unsqueeze(place, [0]) < op.Unsqueeze(count, [1])
    return op.Scan(state, keys, decays, updates, kept, body=token, num_scan_inputs=4, scan_input_axes=[1, 1, 1, 1])


def fold_node(state: Any, key: Any, decay: Any, rates: Any, update: Any, path: Any, count: Any) -> Any:
    """The node of a call of the op."""
    return write_node(fold, state, key, factors(decay, rates), update, path, count)
