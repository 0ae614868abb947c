"""`specstep::rank` as an ONNX function."""

from math import inf

from onnxscript import FLOAT, INT64, script
from onnxscript import opset18 as op

from ..noise_onnx import gumbel
from ..onnx_domain import OPS


@script(OPS, default_opset=op)
def log_share(scores: FLOAT, rest: FLOAT) -> FLOAT:
    """See `reference._log_share`."""
    return scores - op.ReduceLogSumExp(op.Concat(scores, rest, axis=2), [2])


@script(OPS, default_opset=op)
def rank(
    tokens: INT64, log_probs: FLOAT, temperature: FLOAT, seeds: INT64, positions: INT64, top_k: int
) -> tuple[INT64, FLOAT]:
    """See `reference.rank`."""
    count = op.Squeeze(op.Shape(tokens, start=2, end=3))
    place = op.Range(0, count, 1)
    earlier = op.Unsqueeze(place, [0]) < op.Unsqueeze(place, [1])  # [C, C]: whether the second comes first
    same = op.Unsqueeze(tokens, [3]) == op.Unsqueeze(tokens, [2])
    given = op.Where(log_probs < inf, log_probs, -inf)
    again = op.And(op.And(same, op.Unsqueeze(given > -inf, [2])), earlier)
    log_q = op.Where(op.ReduceMax(op.Cast(again, to=INT64.dtype), [3], keepdims=0) > 0, -inf, given)

    warm = op.Unsqueeze(temperature, [1, 2]) > 0.0
    divisor = op.Where(warm, op.Unsqueeze(temperature, [1, 2]), 1.0)
    rest = op.Log(op.Max(1.0 - op.ReduceSum(op.Exp(log_q), [2]), 0.000001)) / divisor
    noise = gumbel(op.Unsqueeze(seeds, [1, 2]), op.Unsqueeze(positions, [1, 2]), tokens)
    noisy = log_share((log_q / divisor + noise) / 0.5, rest / 0.5)
    sampled = op.Round((log_share(log_q / divisor, rest) + noisy) / 2.0 * 4096.0) / 4096.0
    scores = op.Where(warm, sampled, log_q)

    mine, other = op.Unsqueeze(scores, [3]), op.Unsqueeze(scores, [2])
    ahead = op.Or(other > mine, op.And(other == mine, earlier))
    order = op.Unsqueeze(op.ReduceSum(op.Cast(ahead, to=INT64.dtype), [3], keepdims=0), [2])  # [B, F, 1, C]
    chosen = order == op.Unsqueeze(op.Range(0, op.Constant(value_int=top_k), 1), [1])  # [B, F, K, C]
    best = op.ReduceMax(op.Where(chosen, op.Unsqueeze(scores, [2]), -inf), [3], keepdims=0)
    found = op.ReduceSum(op.Where(chosen, op.Unsqueeze(tokens, [2]), 0), [3], keepdims=0)
    return op.Where(best > -inf, found, 0), best


HELPERS = (log_share,)
