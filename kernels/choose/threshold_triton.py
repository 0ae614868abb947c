# mypy: allow-untyped-defs
"""Which tokens top-k and top-p keep: the search for the least value that is kept, exact to the last bit.

A token is kept if all that are above it weigh less than a limit: top-k counts them, top-p sums their probability.
Bounds are tried eight at a time over the whole vocabulary, first at distances from the peak that double, then evenly
among the floats left. Once few enough tokens lie between the two that remain, they are gathered and searched in
registers.
"""

import triton
import triton.language as tl

from ..order_triton import ordered, unordered

BOUNDS = tl.constexpr(8)
MINUS_INFINITY = tl.constexpr(-2139095041)  # `ordered` of it


@triton.jit
def least_kept(
    values, gathered, low, peak, limit,
    IS_SHARE: tl.constexpr, V: tl.constexpr, LIST: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The least number above which tokens weigh less than `limit`, -inf where all do.

    values: [V], a multiple of both blocks, of which `peak` is the greatest, and finite. low: tokens below it are left
    out; -inf for none. limit: a number of tokens or, if IS_SHARE, a share of the probability of those that are not left
    out. gathered: [LIST] to work in.
    """
    lane = tl.arange(0, BOUNDS)
    high = ordered(peak).to(tl.int64)
    low = tl.maximum(ordered(low).to(tl.int64) - 1, MINUS_INFINITY)  # is not kept, or all are
    target, above, rounds = limit, 0.0, 0
    number_low, number_high = V + LIST + 1, 0  # tokens above each; one round at least
    while (number_low - number_high > LIST) & (high - low > 1):
        key = low + ((high - low) * lane >> 3)  # eighths
        doubling = ordered(peak - tl.exp2((lane - 2).to(tl.float32))).to(tl.int64)
        key = tl.where(rounds > 0, key, tl.where(lane < BOUNDS - 1, tl.maximum(doubling, low), low))
        weight, number = _above(values, unordered(key), peak, IS_SHARE, V, BLOCK_N)
        if IS_SHARE:
            target = tl.where(rounds > 0, target, limit * tl.sum(tl.where(lane == BOUNDS - 1, weight, 0.0), 0))
        kept = weight < target
        high = tl.minimum(high, tl.min(tl.where(kept, key, high), 0))
        low = tl.maximum(low, tl.max(tl.where(kept, low, key), 0))
        above = tl.maximum(above, tl.max(tl.where(kept, weight, 0.0), 0))
        number_high = tl.maximum(number_high, tl.max(tl.where(kept, number, 0), 0))
        number_low = tl.minimum(number_low, tl.min(tl.where(kept, V + 1, number), 0))
        rounds += 1
    if high - low > 1:
        _gather(values, gathered, unordered(low), unordered(high), V, LIST, BLOCK_V)
        place = tl.arange(0, LIST)
        value = tl.load(gathered + place, mask=place < number_low - number_high, other=float("-inf"))
        weight = tl.exp(value - peak) if IS_SHARE else tl.full([LIST], 1.0, tl.float32)
        while high - low > 1:
            middle = (low + high) // 2
            kept = above + tl.sum(tl.where(value > unordered(middle), weight, 0.0), 0) < target
            high = tl.where(kept, middle, high)
            low = tl.where(kept, low, middle)
    return unordered(high)


@triton.jit
def _above(values, bounds, peak, IS_SHARE: tl.constexpr, V: tl.constexpr, BLOCK_N: tl.constexpr):
    """What the tokens above each bound weigh, and their number."""
    weights = tl.zeros([BLOCK_N, BOUNDS], tl.float32)
    numbers = tl.zeros([BLOCK_N, BOUNDS], tl.int32)
    for start in range(0, V, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)[:, None]
        value = tl.load(values + token)
        over = value > bounds[None, :]
        numbers += over.to(tl.int32)
        if IS_SHARE:
            weights += tl.where(over, tl.exp(value - peak), 0.0)
    number = tl.sum(numbers, 0)
    return tl.sum(weights, 0) if IS_SHARE else number.to(tl.float32), number


@triton.jit
def _gather(values, gathered, low, high, V: tl.constexpr, LIST: tl.constexpr, BLOCK_V: tl.constexpr):
    """Copy the values above `low` and up to `high`, in their order: a sum over them is the same each time."""
    tl.debug_barrier()
    end = 0
    for start in range(0, V, BLOCK_V):
        token = start + tl.arange(0, BLOCK_V)
        value = tl.load(values + token)
        between = (value > low) & (value <= high)
        if tl.max(between.to(tl.int32), 0) > 0:
            place = end + tl.cumsum(between.to(tl.int32), 0)
            tl.store(gathered + place - 1, value, mask=between & (place <= LIST))
            end = tl.max(place, 0)
    tl.debug_barrier()
