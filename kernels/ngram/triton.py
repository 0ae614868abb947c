# mypy: allow-untyped-defs
"""A level of n-gram drafts on a GPU: a program per node gathers its candidates, their shares, and picks the best.

A search looks at the history block by block and keeps the M best matches in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from ...controls import LEARNED_COUNTS, LEARNED_TOKENS
from ..noise_triton import natural_log
from ..order_triton import LAST_TOKEN, ranked, token_of, unordered
from ..rank.triton import STEPS_PER_NAT, round_to_even
from . import learned as table
from . import reference, tables

FIRST, SECOND, THIRD = (tl.constexpr(factor) for factor in tables.MIX)
BUCKET, LEVELS = tl.constexpr(tables.WIDTH), tl.constexpr(tables.LEVELS)
WAYS, COUNTS, TOKENS = tl.constexpr(table.WAYS), tl.constexpr(LEARNED_COUNTS), tl.constexpr(LEARNED_TOKENS)
ONE_TOKEN, TWO_TOKENS = (tl.constexpr(prior) for prior in reference.LEARNED_CONCENTRATIONS)
MANY = tl.constexpr(2**31 - 1)


@triton.jit
def _mix(first, second):
    """See `tables.mix`; neither is negative."""
    mixed = first * FIRST + second * SECOND
    mixed = ((mixed + (mixed >> 15)) & MANY) * THIRD
    return (mixed + (mixed >> 29)) & MANY


@triton.jit
def _match_lengths(tokens, place, there, context, N: tl.constexpr, AHEAD: tl.constexpr):
    """How many of a node's last tokens stand at each of the places that are there, or with AHEAD 1 ahead of it."""
    run = there
    length = tl.where(there, 0, 0)
    for back in tl.static_range(N):
        at = place - back - AHEAD
        token = tl.load(tokens + at, mask=there & (at >= 0), other=-1)
        run = run & (token == tl.load(context + N - 1 - back))
        length += tl.where(run, 1, 0)
    return length


@triton.jit
def _find_matches(
    history, length, slots, context, N: tl.constexpr, M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Sort keys of the longest, then latest, M matches [BLOCK_M], -1 where there are fewer."""
    lane = tl.arange(0, BLOCK_M)
    best = tl.where(lane < M, -1, MANY)
    for start in range(0, length, BLOCK_S):
        place = start + tl.arange(0, BLOCK_S)
        matched = _match_lengths(history, place, place < length, context, N, 0)
        key = tl.where(matched > 0, matched * slots + place, -1)
        for _ in tl.static_range(M):
            peak = tl.max(key, 0)
            worst = tl.argmin(best, 0)
            best = tl.where((lane == worst) & (peak > best), peak, best)
            key = tl.where(key == peak, -1, key)
    return tl.where(lane < M, best, -1)


@triton.jit
def _follow_prediction(prediction, predicted, slots, middle, context, N: tl.constexpr, BLOCK_S: tl.constexpr):
    """The greatest key of `reference.follow_prediction`, -1 where there is none."""
    best = -1
    for start in range(0, predicted, BLOCK_S):
        place = start + tl.arange(0, BLOCK_S)
        there = place < predicted
        matched = _match_lengths(prediction, place, there, context, N, 1)
        ahead = place - middle
        far = 2 * tl.abs(ahead) - tl.where(ahead > 0, 1, 0)
        key = (matched + 1) * (2 * slots + 1) - 1 - far
        best = tl.maximum(best, tl.max(tl.where(there & ((matched > 0) | (ahead == 0)), key, -1), 0))
    return best


@triton.jit
def _look_up(
    previous, last, bigrams, keys, trigrams, probability, vocabulary, buckets, E: tl.constexpr, BLOCK_E: tl.constexpr
):
    """See `tables.look_up`: tokens and probabilities [BLOCK_E]."""
    before = tl.maximum(previous, 0)
    probe = tl.arange(0, 2 * BUCKET)
    bucket = tl.where(probe < BUCKET, _mix(before, last) % buckets, _mix(last, before) % buckets)
    at = bucket * BUCKET + probe % BUCKET
    slot = tl.max(tl.where(tl.load(keys + at) == previous * vocabulary + last, at, -1), 0)
    place = tl.arange(0, BLOCK_E)
    of_two = tl.load(trigrams + tl.maximum(slot, 0) * E + place, mask=place < tl.where(slot >= 0, E, 0), other=-1)
    of_one = tl.load(bigrams + last * E + place, mask=place < tl.where(slot >= 0, 0, E), other=-1)
    entry = tl.maximum(of_two, of_one)
    known = tl.load(probability + entry % LEVELS, mask=entry >= 0, other=0.0)
    return tl.where(entry >= 0, entry // LEVELS, -1).to(tl.int64), known


@triton.jit
def _remembered(learned, before, after, there, rows):
    """What followed one context, see `learned.remembered`: tokens and counts [WAYS]."""
    row = tl.where(there, _mix(before, after) % rows, rows)
    held = tl.load(learned + row * WAYS + tl.arange(0, WAYS))
    ours = (held // COUNTS // TOKENS == 1 + _mix(after, before)) & (held % COUNTS > 0)
    return tl.where(ours, held // COUNTS % TOKENS, -1), tl.where(ours, held % COUNTS, 0)


@triton.jit
def _counted(share, token, its, times, PRIOR: tl.constexpr):
    """Shares backed off to: those of what followed a context so many times."""
    count = tl.sum(tl.where(token[:, None] == its[None, :], times[None, :], 0), 1).to(tl.float32)
    return tl.div_rn(count + PRIOR * share, tl.sum(times, 0).to(tl.float32) + PRIOR)


@triton.jit
def _store_best(tokens, token, score, best, scores, C: tl.constexpr, TOP_K: tl.constexpr, BLOCK_C: tl.constexpr):
    """The best of a node's candidates, each token once, as `rank` has them for a greedy row, their scores rounded."""
    place = tl.arange(0, BLOCK_C)
    other = tl.load(tokens + place, mask=place < C, other=-1)
    again = (token[:, None] == other[None, :]) & (place[None, :] < place[:, None])  # another one's score is its own
    score = tl.where(tl.max(again.to(tl.int32), 1) > 0, float("-inf"), score)
    rank = ranked(score, place)
    none = ranked(tl.full([BLOCK_C], float("-inf"), tl.float32), LAST_TOKEN)
    for n in range(TOP_K):
        most = tl.max(rank, 0)
        value, chosen = unordered(most >> 32), token_of(most)
        tl.store(best + n, tl.load(tokens + chosen, mask=value > float("-inf"), other=0))
        tl.store(scores + n, round_to_even(value * STEPS_PER_NAT) / STEPS_PER_NAT)
        rank = tl.where(place == chosen, none, rank)


@triton.jit
def ngram_kernel(
    history, lengths, context, prediction, predicted, expected, concentrations, trust,
    bigrams, keys, trigrams, probability, learned,
    width, slots, likely, stride_history, stride_prediction, vocabulary, buckets, rows,
    tokens, best, scores, places,
    TOP_K: tl.constexpr, N: tl.constexpr, M: tl.constexpr, E: tl.constexpr, C: tl.constexpr,
    HAS_TABLES: tl.constexpr, HAS_LEARNED: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(0).to(tl.int64)
    row = (tl.program_id(0) // width).to(tl.int64)
    history += row * stride_history
    prediction += row * stride_prediction
    context += node * N
    tokens += node * C
    last = tl.maximum(tl.load(context + N - 1), 0)
    previous = tl.load(context + N - 2)

    length = tl.minimum(tl.load(lengths + row), slots).to(tl.int32)
    rest = _find_matches(history, length, slots, context, N, M, BLOCK_S, BLOCK_M)
    matched = tl.where(rest >= 0, rest // slots, 0)
    after = tl.minimum(tl.maximum(rest, 0) % slots + 1, slots - 1)
    follow = tl.load(history + after, mask=rest >= 0, other=-1)
    for m in tl.static_range(M):  # not to a place that is computed: the compiler would take the history for written
        top = tl.max(rest, 0)
        after = tl.minimum(tl.maximum(top, 0) % slots + 1, slots - 1)
        tl.store(tokens + m, tl.where(top >= 0, tl.load(history + after), -1))
        rest = tl.where(rest == top, -1, rest)

    hoped = tl.load(expected + node)
    middle = tl.minimum(hoped, likely).to(tl.int32)
    held = tl.minimum(tl.load(predicted + row), likely).to(tl.int32)
    found = _follow_prediction(prediction, held, likely, middle, context, N, BLOCK_S)
    far = 2 * likely - tl.maximum(found, 0) % (2 * likely + 1)
    at = middle + (far + 1) // 2 * tl.where(far % 2 == 1, 1, -1)
    guess = tl.load(prediction + tl.minimum(tl.maximum(at, 0), likely - 1))
    guess = tl.where(found >= 0, guess, -1)
    weight = tl.load(trust + tl.maximum(found, 0) // (2 * likely + 1))
    weight = tl.where(found >= 0, weight, 0.0)
    tl.store(places + node, tl.where(found >= 0, at.to(tl.int64), hoped))
    tl.store(tokens + M, guess)

    if HAS_TABLES:
        entry, known = _look_up(previous, last, bigrams, keys, trigrams, probability, vocabulary, buckets, E, BLOCK_E)
        column = tl.arange(0, BLOCK_E)
        tl.store(tokens + M + 1 + column, entry, mask=column < E)
    if HAS_LEARNED:
        alone = tl.full([], TOKENS, tl.int64)
        its, times = _remembered(learned, alone, last, tl.load(context + N - 1) >= 0, rows)
        pairs, pair_times = _remembered(learned, tl.maximum(previous, 0), last, previous >= 0, rows)
        column = C - 2 * WAYS + tl.arange(0, WAYS)
        tl.store(tokens + column, its)
        tl.store(tokens + column + WAYS, pairs)
    tl.debug_barrier()

    candidate = tl.arange(0, BLOCK_C)
    token = tl.load(tokens + candidate, mask=candidate < C, other=-1)
    share = tl.zeros([BLOCK_C], tl.float32)
    if HAS_TABLES:
        share = tl.sum(tl.where(token[:, None] == entry[None, :], known[None, :], 0.0), 1)
    if HAS_LEARNED:
        share = _counted(share, token, its, times, ONE_TOKEN)
        share = _counted(share, token, pairs, pair_times, TWO_TOKENS)
    for least in tl.static_range(1, N + 1):
        concentration = tl.load(concentrations + least - 1)
        counts = (token[:, None] == follow[None, :]) & (matched >= least)[None, :]
        count = tl.sum(tl.where(counts, 1.0, 0.0), 1)
        total = tl.sum(tl.where(matched >= least, 1.0, 0.0), 0)
        estimate = tl.div_rn(count + concentration * share, tl.maximum(total + concentration, 1e-9))
        share = tl.where(concentration > 0, estimate, share)
    share = weight * tl.where(token == guess, 1.0, 0.0) + (1 - weight) * share
    there = (token >= 0) & (share > 0)
    log_share = tl.where(there, natural_log(tl.where(there, share, 1.0)), float("-inf"))
    _store_best(tokens, token, log_share, best + node * TOP_K, scores + node * TOP_K, C, TOP_K, BLOCK_C)


def ngram(
    history: Tensor,
    lengths: Tensor,
    context: Tensor,
    prediction: Tensor,
    predicted: Tensor,
    expected: Tensor,
    concentrations: Tensor,
    trust: Tensor,
    bigrams: Tensor | None,
    keys: Tensor | None,
    trigrams: Tensor | None,
    probability: Tensor | None,
    learned: Tensor | None,
    matches: int,
    top_k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch for `reference.ngram`."""
    batch, width, longest = context.shape
    entries = 0 if bigrams is None else bigrams.shape[1]
    count = matches + 1 + entries + (0 if learned is None else 2 * table.WAYS)
    tokens = torch.empty(batch, width, count, dtype=torch.int64, device=context.device)
    best = torch.empty(batch, width, top_k, dtype=torch.int64, device=context.device)
    scores = torch.empty(batch, width, top_k, dtype=torch.float32, device=context.device)
    places = torch.empty(batch, width, dtype=torch.int64, device=context.device)
    wrap_triton(ngram_kernel)[(batch * width,)](
        history,
        lengths.contiguous(),
        context.contiguous(),
        prediction,
        predicted.contiguous(),
        expected.contiguous(),
        concentrations,
        trust,
        *(lengths if each is None else each for each in (bigrams, keys, trigrams, probability, learned)),
        width,
        history.shape[1],
        prediction.shape[1],
        history.stride(0),
        prediction.stride(0),
        1 if bigrams is None else bigrams.shape[0],
        1 if keys is None else keys.shape[0] // tables.WIDTH,
        1 if learned is None else learned.shape[0] - 1,
        tokens,
        best,
        scores,
        places,
        TOP_K=top_k,
        N=longest,
        M=matches,
        E=entries,
        C=count,
        HAS_TABLES=bigrams is not None,
        HAS_LEARNED=learned is not None,
        BLOCK_S=512,
        BLOCK_M=triton.next_power_of_2(matches),
        BLOCK_E=triton.next_power_of_2(max(entries, 1)),
        BLOCK_C=triton.next_power_of_2(count),
        num_warps=4,
    )
    return best, scores, places
