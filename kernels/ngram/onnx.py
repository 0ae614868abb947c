"""`specstep::ngram` as ONNX nodes. They are no function: how many there are depends on the match lengths."""

from typing import Any

from onnx import TensorProto, helper
from onnxscript import FLOAT, INT32, INT64
from onnxscript import opset18 as op

from ..onnx_domain import write_node
from ..rank.onnx import rank
from .learned import ALONE, COUNTS, MOST_TOKENS
from .reference import LEARNED_CONCENTRATIONS
from .tables import LEVELS, MIX, WIDTH


def ngram_nodes(
    history: Any, lengths: Any, context: Any, prediction: Any, predicted: Any, expected: Any, concentrations: Any,
    trust: Any, bigrams: Any, keys: Any, trigrams: Any, probability: Any, learned: Any, matches: int, top_k: int,
) -> Any:  # fmt: skip
    """See `reference.ngram`."""
    length, follow = _matches(history, lengths, context, matches)
    places, guess, weight = _follow_prediction(prediction, predicted, context, expected, trust)
    previous, last, tokens = _last(context, 2), _last(context, 1), [op.Where(length > 0, follow, _integer(-1)), guess]
    entries = known = None
    if bigrams is not None:
        entries, known = _look_up(previous, last, bigrams, keys, trigrams, probability)
        tokens.append(entries)
    seen = [] if learned is None else [_remembered(*pair, learned) for pair in _contexts(previous, last)]
    tokens += [its for its, _ in seen]
    tokens = op.Concat(*tokens, axis=2)  # [B, F, C]
    share = op.CastLike(tokens * 0, _number(0.0)) if entries is None else _sum_of_same(tokens, entries, known)
    for (its, counts), concentration in zip(seen, LEARNED_CONCENTRATIONS, strict=False):
        times = op.Cast(counts, to=FLOAT.dtype)
        total = op.ReduceSum(times, op.Constant(value_ints=[2]), keepdims=1) + concentration
        share = (_sum_of_same(tokens, its, times) + concentration * share) / total
    same = op.Equal(_unsqueezed(tokens, 3), _unsqueezed(follow, 2))  # [B, F, C, M]
    for least in range(1, context.shape[2] + 1):
        matched = length >= _integer(least)  # [B, F, M]
        count = _count(op.And(same, _unsqueezed(matched, 2)), 3, 0)
        concentration = op.Slice(concentrations, *(op.Constant(value_ints=[i]) for i in (least - 1, least)))
        total = op.Max(_count(matched, 2, 1) + concentration, _number(1e-9))
        share = op.Where(concentration > 0.0, (count + concentration * share) / total, share)
    hit = op.Cast(op.Equal(tokens, guess), to=FLOAT.dtype)
    share = weight * hit + (1.0 - weight) * share
    scores = op.Log(op.Where(tokens < 0, _number(0.0), share))
    greedy = lengths * 0
    best, score = write_node(rank, tokens, scores, op.Cast(greedy, to=FLOAT.dtype), greedy, greedy, top_k=top_k)
    return best, op.Round(score * 4096.0) / 4096.0, places


def _matches(history: Any, lengths: Any, context: Any, matches: int) -> tuple[Any, Any]:
    """The lengths of the longest, then latest, matches, and what follows them, both [B, F, M]."""
    slots = op.Shape(history, start=1, end=2)
    place = op.Range(0, op.Squeeze(slots), 1)  # [S]
    total = _match_lengths(history, _before(place, lengths), context, 0)
    key = total * op.Cast(slots, to=INT32.dtype) + op.Cast(place, to=INT32.dtype)
    found, axis = [], op.Constant(value_ints=[2])
    for _ in range(matches):
        found.append(op.ReduceMax(key, axis))
        key = op.Where(key < found[-1], key, op.Constant(value=_int32(-1)))
    best = op.Cast(op.Concat(*found, axis=2) if matches > 1 else found[0], to=INT64.dtype)
    end = op.Min(op.Mod(best, slots) + 1, slots - 1)
    row = op.Expand(_unsqueezed(history, 1), op.Concat(op.Shape(context, start=0, end=2), slots, axis=0))
    return op.Div(best, slots), op.GatherElements(row, end, axis=2)


def _sum_of_same(tokens: Any, entries: Any, values: Any) -> Any:
    """For each token [B, F, C] the sum of the values [B, F, E] whose entries are that token."""
    same = op.Equal(_unsqueezed(tokens, 3), _unsqueezed(entries, 2))
    return op.ReduceSum(op.Where(same, _unsqueezed(values, 2), _number(0.0)), op.Constant(value_ints=[3]), keepdims=0)


def _contexts(previous: Any, last: Any) -> list[tuple[Any, Any, Any]]:
    """The contexts of one token and of two: what comes before the last token, that token, and whether there is one."""
    none = _integer(0)
    return [(last * 0 + ALONE, last, last >= none), (op.Max(previous, none), last, previous >= none)]


def _remembered(before: Any, last: Any, there: Any, learned: Any) -> tuple[Any, Any]:
    """See `learned.remembered`, of one kind of context: tokens and counts [B, F, W]."""
    rows = op.Sub(op.Shape(learned, start=0, end=1), _integer(1))
    row = op.Where(there, op.Mod(_mix(before, last), rows), rows)
    held = op.Gather(learned, row)
    key, count = op.Div(held, _integer(COUNTS)), op.Mod(held, _integer(COUNTS))
    same = op.Equal(op.Div(key, _integer(MOST_TOKENS)), _unsqueezed(_mix(last, before) + 1, 2))
    ours = op.And(same, count > _integer(0))
    return op.Where(ours, op.Mod(key, _integer(MOST_TOKENS)), _integer(-1)), op.Where(ours, count, _integer(0))


def _follow_prediction(
    prediction: Any, predicted: Any, context: Any, expected: Any, trust: Any
) -> tuple[Any, Any, Any]:
    """See `reference.follow_prediction`."""
    slots = op.Shape(prediction, start=1, end=2)
    none, zero, one = (op.Constant(value=_int32(value)) for value in (-1, 0, 1))
    place = op.Range(0, op.Squeeze(slots), 1)  # [P]
    there = _before(place, predicted)
    length = _match_lengths(prediction, there, context, 1)
    middle = _unsqueezed(op.Min(expected, slots), 2)
    ahead = op.Cast(place, to=INT32.dtype) - op.Cast(middle, to=INT32.dtype)  # [B, F, P]
    far = op.Abs(ahead + ahead) - op.Cast(ahead > zero, to=INT32.dtype)
    key = (length + one) * op.Cast(slots * 2 + 1, to=INT32.dtype) - one - far
    known = op.And(there, op.Or(length > zero, op.Equal(ahead, zero)))
    best = op.Cast(op.ReduceMax(op.Where(known, key, none), op.Constant(value_ints=[2])), to=INT64.dtype)  # [B, F, 1]
    known, best = best >= 0, op.Max(best, _integer(0))
    far = slots * 2 - op.Mod(best, slots * 2 + 1)
    step = op.Div(far + 1, _integer(2))
    found = middle + op.Where(op.Equal(op.Mod(far, _integer(2)), _integer(1)), step, op.Neg(step))
    row = op.Expand(_unsqueezed(prediction, 1), op.Concat(op.Shape(context, start=0, end=2), slots, axis=0))
    token = op.GatherElements(row, op.Min(op.Max(found, _integer(0)), slots - 1), axis=2)
    weight = op.Gather(trust, op.Div(best, slots * 2 + 1))
    places = op.Squeeze(op.Where(known, found, _unsqueezed(expected, 2)), op.Constant(value_ints=[2]))
    return places, op.Where(known, token, _integer(-1)), op.Where(known, weight, _number(0.0))


def _before(place: Any, lengths: Any) -> Any:
    """Which places [S] lie ahead of the rows' lengths [B], [B, 1, S]."""
    return _unsqueezed(op.Unsqueeze(place, op.Constant(value_ints=[0])) < _unsqueezed(lengths, 1), 1)


def _match_lengths(tokens: Any, there: Any, context: Any, first: int) -> Any:
    """How many of a node's last tokens stand at each of the places [B, 1, S] that are there, or with `first` 1 ahead of
    it: int32 [B, F, S]."""
    slots, total, run = op.Shape(tokens, start=1, end=2), None, there
    narrow = op.Cast(tokens, to=INT32.dtype)
    for back in range(context.shape[2]):
        shift = op.Constant(value_ints=[0, back + first, 0, 0])
        padded = op.Pad(narrow, shift, op.Constant(value=_int32(-1))) if back + first else narrow
        cut = op.Constant(value_ints=[0]), slots, op.Constant(value_ints=[1])
        shifted = op.Slice(padded, *cut) if back + first else narrow
        token = op.Cast(_last(context, back + 1), to=INT32.dtype)
        run = op.And(run, op.Equal(_unsqueezed(shifted, 1), _unsqueezed(token, 2)))  # [B, F, S]
        one = op.Cast(run, to=INT32.dtype)
        total = one if total is None else total + one
    return total


def _look_up(previous: Any, last: Any, bigrams: Any, keys: Any, trigrams: Any, probability: Any) -> tuple[Any, Any]:
    """See `tables.look_up`."""
    before, buckets = op.Max(previous, _integer(0)), _integer(keys.shape[0] // WIDTH)
    homes = [_unsqueezed(op.Mod(_mix(*pair), buckets), 2) for pair in ((before, last), (last, before))]
    homes = op.Concat(*homes, axis=2)
    slots = _unsqueezed(homes, 3) * WIDTH + op.Constant(value_ints=list(range(WIDTH)))
    slots = op.Reshape(slots, op.Concat(op.Shape(last), op.Constant(value_ints=[2 * WIDTH]), axis=0))
    key = _unsqueezed(previous * bigrams.shape[0] + last, 2)
    known = op.Where(op.Equal(op.Gather(keys, slots), key), slots, _integer(-1))
    slot = op.ReduceMax(known, op.Constant(value_ints=[2]), keepdims=0)  # both buckets may be the same one
    rows = op.Gather(trigrams, op.Max(slot, _integer(0)))
    entries = op.Cast(op.Where(_unsqueezed(slot >= 0, 2), rows, op.Gather(bigrams, last)), to=INT64.dtype)
    there, packed = entries >= 0, op.Max(entries, _integer(0))
    share = op.Gather(probability, op.Mod(packed, _integer(LEVELS)))
    return op.Where(there, op.Div(packed, _integer(LEVELS)), _integer(-1)), op.Where(there, share, _number(0.0))


def _mix(first: Any, second: Any) -> Any:
    """See `tables.mix`."""
    mixed = first * _integer(MIX[0]) + second * _integer(MIX[1])
    mixed = op.Mod(mixed + op.Div(mixed, _integer(2**15)), _integer(2**31)) * _integer(MIX[2])
    return op.Mod(mixed + op.Div(mixed, _integer(2**29)), _integer(2**31))


def _last(context: Any, place: int) -> Any:
    """The tokens [B, F] that stand `place` from the end of each context."""
    return op.Gather(context, _integer(context.shape[2] - place), axis=2)


def _count(flags: Any, axis: int, keepdims: int) -> Any:
    return op.ReduceSum(op.Cast(flags, to=FLOAT.dtype), op.Constant(value_ints=[axis]), keepdims=keepdims)


def _unsqueezed(x: Any, axis: int) -> Any:
    return op.Unsqueeze(x, op.Constant(value_ints=[axis]))


def _integer(value: int) -> Any:
    return op.Constant(value_int=value)


def _number(value: float) -> Any:
    return op.Constant(value_float=value)


def _int32(value: int) -> Any:
    return helper.make_tensor("value", TensorProto.INT32, [], [value])
