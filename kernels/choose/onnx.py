"""`specstep::choose` as ONNX functions: what no row asks for costs next to nothing, each option is behind an If.

The first branch of every If holds for any input, the second is a shorter way where it does: TensorRT, which builds no
If inside an If, gets the first ones alone (`compile/tensorrt/graph.py`). Nor does it sort a vocabulary or sum what is
scattered to one place: counts are matrix products here, and what top-k and top-p keep is found by bisection, which is
faster than sorting, too (ONNX Runtime, 8 x 49152: 8 ms, 70 ms).
"""

from math import inf

from onnxscript import FLOAT, INT32, INT64, script
from onnxscript import opset18 as op

from ..bits_onnx import only_allowed, unpack_bits
from ..noise_onnx import gumbel
from ..onnx_domain import OPS, Float


@script(OPS, default_opset=op)
def biased_logits(x: FLOAT, bias_ids: INT64, bias: FLOAT) -> FLOAT:
    """See `reference._biased`."""
    vocabulary = op.Shape(x, start=2, end=3)
    there = bias_ids >= 0
    width = vocabulary + op.Shape(bias_ids, start=1, end=2)  # TensorRT wants no more places than there are values
    none = op.Expand(0.0, op.Concat(op.Shape(x, start=0, end=1), width, axis=0))
    added = op.ScatterElements(none, op.Where(there, bias_ids, vocabulary), op.Where(there, bias, 0.0), axis=1)
    return x + op.Unsqueeze(op.Slice(added, [0], vocabulary, [1]), [1])


@script(OPS, default_opset=op)
def token_counts(history: INT64, lengths: INT64, prompt_lengths: INT64, vocabulary: INT64) -> FLOAT:
    """See `reference._counts`. -> [B, 2, V]. A token is two digits to the base 256, and their one-hots' product counts
    each pair."""
    place = op.Range(0, op.Squeeze(op.Shape(history, start=1, end=2)), 1)
    there = place <= op.Unsqueeze(lengths, [1])
    ours = op.And(there, place >= op.Unsqueeze(prompt_lengths, [1]))
    counted = op.Cast(op.Concat(op.Unsqueeze(there, [1]), op.Unsqueeze(ours, [1]), axis=1), to=FLOAT.dtype)  # [B, 2, S]
    known = op.Max(op.Min(history, vocabulary - 1), 0)
    high, low = known / 256, op.Mod(known, 256)
    digits = op.Range(0, op.Squeeze((vocabulary + 255) / 256), 1)
    rows = op.Cast(op.Unsqueeze(high, [1, 2]) == op.Unsqueeze(digits, [1]), to=FLOAT.dtype)  # [B, 1, V / 256, S]
    columns = op.Cast(op.Unsqueeze(low, [1, 3]) == op.Range(0, 256, 1), to=FLOAT.dtype)  # [B, 1, S, 256]
    counts = op.Reshape(op.MatMul(rows * op.Unsqueeze(counted, [2]), columns), [0, 0, -1])
    return op.Slice(counts, [0], vocabulary, [2])


@script(OPS, default_opset=op)
def penalized_logits(
    x: FLOAT, tokens: INT64, ancestors: INT32, history: INT64, lengths: INT64, prompt_lengths: INT64, sampling: FLOAT
) -> FLOAT:
    """See `reference._penalized`."""
    at_root = token_counts(history, lengths, prompt_lengths, op.Shape(x, start=2, end=3))  # [B, 2, V]
    count = op.Shape(tokens, start=1, end=2)
    drafted = op.And(unpack_bits(ancestors, count), op.Range(0, op.Squeeze(count), 1) > 0)  # the root is in the row
    ids = op.Range(0, op.Squeeze(op.Shape(x, start=2, end=3)), 1)
    one_hot = op.Cast(op.Unsqueeze(tokens, [2]) == ids, to=FLOAT.dtype)
    path = op.MatMul(op.Cast(drafted, to=FLOAT.dtype), one_hot)
    every = path + op.Slice(at_root, [0], [1], [1])
    output = path + op.Slice(at_root, [1], [2], [1])

    columns = op.Unsqueeze(sampling, [2])
    repeated = op.Slice(columns, [4], [5], [1])
    repeated = op.Where(repeated > 0.0, repeated, 1.0)
    out = op.Where(every > 0.0, op.Where(x > 0.0, x / repeated, x * repeated), x)
    out = out - op.Slice(columns, [6], [7], [1]) * output
    return out - op.Slice(columns, [5], [6], [1]) * op.Cast(output > 0.0, to=FLOAT.dtype)


@script(OPS, default_opset=op)
def allowed_logits(x: FLOAT, banned: INT64, allowed: INT32, masked: INT64) -> FLOAT:
    """See `reference._without`."""
    vocabulary = op.Shape(x, start=2, end=3)
    places = op.Where(banned >= 0, banned, vocabulary)
    padded = op.Pad(x, op.Concat([0, 0, 0, 0, 0], op.Shape(banned, start=2, end=3), axis=0))
    left = op.ScatterElements(padded, places, op.Expand(-inf, op.Shape(places)), axis=2)
    left = op.Slice(left, [0], vocabulary, [2])
    if op.ReduceMax(op.Abs(masked), keepdims=0) > 0:  # noqa: SIM108 (an ONNX If)
        out = only_allowed(left, allowed, masked)
    else:
        out = op.Identity(left)
    return out


@script(OPS, default_opset=op)
def threshold(x: FLOAT, weight: FLOAT, limit: FLOAT, highest: FLOAT) -> FLOAT:
    """The least x [..., 1] such that all greater ones weigh less than the limit, -inf where all x together do. Of those
    within 128 of the highest: the others are never chosen. Halves an interval whose lower end is not kept, and whose
    upper end is, until no two values fit into it."""
    low, high = highest - 128.0, highest
    all_kept = op.ReduceSum(op.Where(x > low, weight, 0.0), [-1], keepdims=1) < limit
    low = op.Where(all_kept, high, low)
    middle = (low + high) * 0.5
    splits = op.And(op.And(low < middle, middle < high), high - low > 1e-10)
    go_on = op.ReduceMax(op.Cast(splits, to=INT64.dtype), keepdims=0) > 0
    while go_on:
        kept = op.ReduceSum(op.Where(x > middle, weight, 0.0), [-1], keepdims=1) < limit
        low, high = op.Where(kept, low, middle), op.Where(kept, middle, high)
        middle = (low + high) * 0.5
        splits = op.And(op.And(low < middle, middle < high), high - low > 1e-10)
        go_on = op.ReduceMax(op.Cast(splits, to=INT64.dtype), keepdims=0) > 0
    return op.Where(all_kept, -inf, op.ReduceMin(op.Where(x > low, x, highest), [-1], keepdims=1))


@script(OPS, default_opset=op)
def least_kept(x: FLOAT, whole: FLOAT, limits: FLOAT) -> tuple[FLOAT, FLOAT]:
    """The least values that top-k keeps, and that top-k, top-p and min-p keep, -inf for all: [B, T, 1] each. whole:
    scaled logits [B, T, V]; x: the same, or the greatest of them, [B, T, N]. limits: top-k, top-p, min-p, [B, 3, 1]."""
    top_k, top_p, min_p = op.Split(limits, axis=1, num_outputs=3)
    highest = op.ReduceMax(x, [-1], keepdims=1)
    finite = op.Max(highest, -3.4028234663852886e38)
    most = threshold(x, op.Constant(value_float=1.0), op.Where(top_k > 0.0, top_k, inf), highest)
    mass = op.ReduceSum(op.Where(whole < most, 0.0, op.Exp(whole - finite)), [-1], keepdims=1)
    weight = op.Where(x < most, 0.0, op.Exp(x - finite))
    least = threshold(x, weight, op.Where(top_p > 0.0, top_p * mass, inf), highest)
    return most, op.Max(op.Max(most, least), highest + op.Log(min_p))


@script(OPS, default_opset=op)
def noisy(x: FLOAT, ids: INT64, positions: INT64, temperature: FLOAT, seeds: INT64) -> FLOAT:
    """X with the noise of these ids, without at temperature 0."""
    noise = gumbel(op.Unsqueeze(seeds, [1, 2]), op.Unsqueeze(positions, [2]), ids)
    return op.Where(temperature > 0.0, x + noise, x)


@script(OPS, default_opset=op)
def sample(x: FLOAT, positions: INT64, sampling: FLOAT, seeds: INT64) -> INT64:
    """The choice [B, T] of logits [B, T, V] that no penalty, bias or ban awaits. What top-k, top-p and min-p leave is
    most often among few tokens: then only these get noise."""
    columns = op.Unsqueeze(sampling, [2])
    temperature = op.Slice(columns, [0], [1], [1])  # [B, 1, 1]
    sampled = temperature > 0.0
    scaled = x / op.Where(sampled, temperature, 1.0)
    ids = op.Range(0, op.Squeeze(op.Shape(x, start=2, end=3)), 1)
    limits = op.Where(sampled, op.Slice(columns, [1], [4], [1]), 0.0)
    if op.ReduceMax(limits, keepdims=0) > 0.0:
        few = op.Min(op.Shape(x, start=2, end=3), op.Constant(value_ints=[256]))
        likeliest, places = op.TopK(scaled, few)
        last = op.Slice(likeliest, [-1], [9223372036854775807], [2])
        most, least = least_kept(likeliest, scaled, limits)
        open = op.Or(least <= last, op.And(op.Slice(limits, [0], [1], [1]) > 0.0, most <= last))
        if op.ReduceMax(op.Cast(op.And(sampled, open), to=INT64.dtype), keepdims=0) > 0:
            _most, bound = least_kept(scaled, scaled, limits)
            key = noisy(op.Where(scaled < bound, -inf, scaled), ids, positions, temperature, seeds)
            choice = op.ArgMax(key, axis=-1, keepdims=0)
        else:
            few_keys = noisy(op.Where(likeliest < least, -inf, likeliest), places, positions, temperature, seeds)
            behind = few_keys < op.ReduceMax(few_keys, [-1], keepdims=1)
            choice = op.ReduceMin(
                op.Where(behind, 9223372036854775807, places), [-1], keepdims=0
            )  # of equals the lowest
    else:
        choice = op.ArgMax(noisy(scaled, ids, positions, temperature, seeds), axis=-1, keepdims=0)
    return choice


@script(OPS, default_opset=op)
def choose(
    logits: Float,
    tokens: INT64,
    ancestors: INT32,
    depths: INT64,
    history: INT64,
    lengths: INT64,
    prompt_lengths: INT64,
    sampling: FLOAT,
    seeds: INT64,
    bias_ids: INT64,
    bias: FLOAT,
    banned: INT64,
    allowed: INT32,
    masked: INT64,
) -> INT64:
    """See `reference.choose`."""
    biases = op.ReduceMax(bias_ids, keepdims=0) >= 0
    penalties = op.ReduceMax(op.Abs(op.Slice(sampling, [4], [7], [1])), keepdims=0) > 0.0
    bans = op.Or(op.ReduceMax(banned, keepdims=0) >= 0, op.ReduceMax(op.Abs(masked), keepdims=0) > 0)
    sampled = op.ReduceMax(op.Slice(sampling, [0], [1], [1]), keepdims=0) > 0.0
    if op.Or(op.Or(biases, penalties), op.Or(bans, sampled)):
        x = op.Cast(logits, to=FLOAT.dtype)
        if biases:  # noqa: SIM108 (an ONNX If)
            x_biased = biased_logits(x, bias_ids, bias)
        else:
            x_biased = op.Identity(x)
        if penalties:
            x_penalized = penalized_logits(x_biased, tokens, ancestors, history, lengths, prompt_lengths, sampling)
        else:
            x_penalized = op.Identity(x_biased)
        if bans:  # noqa: SIM108
            x_left = allowed_logits(x_penalized, banned, allowed, masked)
        else:
            x_left = op.Identity(x_penalized)
        if sampled:
            choice = sample(x_left, op.Unsqueeze(lengths, [1]) + depths + 1, sampling, seeds)
        else:
            choice = op.ArgMax(x_left, axis=-1, keepdims=0)
    else:
        choice = op.ArgMax(logits, axis=-1, keepdims=0)
    return choice


HELPERS = (
    biased_logits, token_counts, penalized_logits, allowed_logits, threshold, least_kept, noisy, sample,
)  # fmt: skip
