# mypy: allow-untyped-defs
"""The choice on a GPU: one program per node, which owns its row of logits.

A greedy row that asks for nothing takes one pass over its logits. Others write processed logits to scratch memory and
work there. All conditions are numbers that the whole program shares, so its threads meet at every barrier.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from ..noise_triton import gumbel, most_gumbel, natural_log, noise_bits, noise_keys, uniform
from ..order_triton import best_token
from .blocks import LIST, blocks, scratch_size
from .threshold_triton import least_kept


@triton.jit
def _count(
    counts, history, length, prompt, tokens, bits, nodes, V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr
):
    """How often the row, and the path to a node, holds each token: bit 0 is set by those of the prompt, others count by
    2."""
    offset = tl.arange(0, BLOCK_V)
    for start in range(0, V, BLOCK_V):
        tl.store(counts + start + offset, tl.zeros([BLOCK_V], tl.int32), mask=start + offset < V)
    tl.debug_barrier()
    for start in range(0, length + 1, BLOCK_V):
        place = start + offset
        there = place <= length
        token = tl.minimum(tl.maximum(tl.load(history + place, mask=there, other=0), 0), V - 1)
        tl.atomic_or(counts + token, 1, mask=there & (place < prompt), sem="relaxed")
        tl.atomic_add(counts + token, 2, mask=there & (place >= prompt), sem="relaxed")
    node = tl.arange(0, BLOCK_T)
    ancestor = (tl.load(bits + node // 32, mask=node < nodes, other=0) >> (node % 32)) & 1
    drafted = (ancestor != 0) & (node > 0)  # the root is in the row
    token = tl.load(tokens + node, mask=drafted, other=0)
    tl.atomic_add(counts + token, 2, mask=drafted & (token >= 0) & (token < V), sem="relaxed")
    tl.debug_barrier()


@triton.jit
def _process(logits, sampling, allowed, restricted, token, inside, added, count):
    """Logits of some tokens after bias, penalties, mask and temperature. Tokens from `restricted` on have no mask."""
    temperature = tl.load(sampling)
    repetition, presence, frequency = tl.load(sampling + 4), tl.load(sampling + 5), tl.load(sampling + 6)
    x = tl.load(logits + token, mask=inside, other=0.0).to(tl.float32) + added
    repetition = tl.where(repetition > 0, repetition, 1.0)
    repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    output = (count >> 1).to(tl.float32)
    x = tl.where(count != 0, repeated, x) - frequency * output
    x -= presence * tl.where(output > 0, 1.0, 0.0)
    word = tl.load(allowed + token // 32, mask=inside & (token < restricted), other=-1)
    x = tl.where(((word >> (token % 32).to(tl.int32)) & 1) != 0, x, float("-inf"))
    return tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0))


@triton.jit
def _process_all(
    values, logits, sampling, allowed, restricted, counted, biased, added, banned,
    V: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write processed logits over the counts, which lie in the same memory; tokens from `counted` on have none. The
    last block is filled up with -inf, so that it is read without a mask."""
    counts = values.to(tl.pointer_type(tl.int32), bitcast=True)
    is_biased = (biased >= 0) & (biased < V)
    biased_count = tl.load(counts + biased, mask=is_biased & (biased < counted), other=0)
    corrected = _process(logits, sampling, allowed, restricted, biased, is_biased, added, biased_count)
    tl.debug_barrier()
    for start in range(0, V, BLOCK_V):
        token = start + tl.arange(0, BLOCK_V)
        count = tl.load(counts + token, mask=token < counted, other=0)
        value = _process(logits, sampling, allowed, restricted, token, token < V, 0.0, count)
        tl.store(values + token, tl.where(token < V, value, float("-inf")))
    tl.debug_barrier()
    tl.store(values + biased, corrected, mask=is_biased)
    tl.debug_barrier()
    gone = tl.full(banned.shape, float("-inf"), tl.float32)
    tl.store(values + banned, gone, mask=(banned >= 0) & (banned < V))
    tl.debug_barrier()


@triton.jit
def _best(values, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """The token with the greatest value, the lowest among equals, 0 if all are -inf."""
    lane = tl.arange(0, BLOCK_V)
    best = tl.full([BLOCK_V], float("-inf"), tl.float32)
    found = tl.zeros([BLOCK_V], tl.int32)
    for start in tl.range(0, V, BLOCK_V, loop_unroll_factor=4):
        value = tl.load(values + start + lane, mask=start + lane < V, other=float("-inf")).to(tl.float32)
        found = tl.where(value > best, start + lane, found)
        best = tl.maximum(value, best)
    return best_token(best, found)


@triton.jit
def _sample(values, least, seed, position, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """The token with the greatest sum of value and noise, of those with a value of at least `least`."""
    first, second = noise_keys(seed, position)
    lane = tl.arange(0, BLOCK_V)
    best = tl.full([BLOCK_V], float("-inf"), tl.float32)
    found = tl.zeros([BLOCK_V], tl.int32)
    peak = float("-inf")
    for start in range(0, V, BLOCK_V):
        token = start + lane
        value = tl.load(values + token)
        value = tl.where(value >= least, value, float("-inf"))
        w = uniform(noise_bits(first, second, token))
        if tl.max(value + most_gumbel(w), 0) > peak:  # else none of this block is the choice
            noisy = value + gumbel(w)
            found = tl.where(noisy > best, token, found)
            best = tl.maximum(noisy, best)
            peak = tl.max(best, 0)
    return best_token(best, found)


@triton.jit
def _least(
    values, gathered, peak, sampling,
    V: tl.constexpr, LIST: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The least value that top-k, then top-p, then min-p keep."""
    top_k, top_p, min_p = tl.load(sampling + 1), tl.load(sampling + 2), tl.load(sampling + 3)
    least = float("-inf")
    if (top_k > 0) & (top_k < V):
        top_k = tl.maximum(tl.floor(top_k), 1.0)
        least = least_kept(values, gathered, least, peak, top_k, False, V, LIST, BLOCK_V, BLOCK_N)
    if top_p > 0:
        lower = least_kept(values, gathered, least, peak, top_p, True, V, LIST, BLOCK_V, BLOCK_N)
        least = tl.maximum(least, lower)
    if min_p > 0:
        least = tl.maximum(least, peak + natural_log(min_p))
    return least


@triton.jit
def choose_kernel(
    logits, tokens, ancestors, depths, history, lengths, prompt_lengths, sampling, seeds, bias_ids, bias, banned,
    allowed, masked,
    nodes, words, slots, biases, bans,
    choice, scratch,
    V: tl.constexpr, LIST: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64)
    row = (tl.program_id(0) // nodes).to(tl.int64)
    logits += entry * V
    sampling += row * 7
    place = tl.arange(0, BLOCK_E)
    biased = tl.load(bias_ids + row * biases + place, mask=place < biases, other=-1)
    added = tl.load(bias + row * biases + place, mask=biased >= 0, other=0.0)
    place = tl.arange(0, BLOCK_X)
    out = tl.load(banned + entry * bans + place, mask=place < bans, other=-1)
    restricted = tl.where(tl.load(masked + row) != 0, V, 0)
    sampled = tl.load(sampling) > 0
    penalized = (tl.load(sampling + 4) > 0) | (tl.load(sampling + 5) != 0) | (tl.load(sampling + 6) != 0)
    if sampled | penalized | (restricted > 0) | (tl.max(biased, 0) >= 0) | (tl.max(out, 0) >= 0):
        size: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V * BLOCK_V
        values = scratch + entry * (size + LIST)
        length = tl.load(lengths + row)
        if penalized:
            counts = values.to(tl.pointer_type(tl.int32), bitcast=True)
            last = tl.minimum(length, slots - 1).to(tl.int32)
            prompt, bits = tl.load(prompt_lengths + row), ancestors + entry * words
            _count(counts, history + row * slots, last, prompt, tokens + row * nodes, bits, nodes, V, BLOCK_V, BLOCK_T)
        allowed += entry * ((V + 31) // 32)
        counted = tl.where(penalized, V, 0)
        _process_all(values, logits, sampling, allowed, restricted, counted, biased, added, out, V, BLOCK_V)
        best = _best(values, size, BLOCK_V)
        peak = tl.load(values + best)
        if sampled & (peak > float("-inf")):
            least = _least(values, values + size, peak, sampling, size, LIST, BLOCK_V, BLOCK_N)
            position = length + tl.load(depths + entry) + 1
            best = _sample(values, least, tl.load(seeds + row), position, size, BLOCK_V)
    else:
        best = _best(logits, V, BLOCK_V)
    tl.store(choice + entry, best.to(tl.int64))


def choose(
    logits: Tensor,
    tokens: Tensor,
    ancestors: Tensor,
    depths: Tensor,
    history: Tensor,
    lengths: Tensor,
    prompt_lengths: Tensor,
    sampling: Tensor,
    seeds: Tensor,
    bias_ids: Tensor,
    bias: Tensor,
    banned: Tensor,
    allowed: Tensor,
    masked: Tensor,
) -> Tensor:
    """Launch for `reference.choose`."""
    batch, nodes, vocabulary = logits.shape
    biases, bans = bias_ids.shape[1], banned.shape[2]
    choice = torch.empty(batch, nodes, dtype=torch.int64, device=logits.device)
    scratch = torch.empty(batch, nodes, scratch_size(vocabulary), dtype=torch.float32, device=logits.device)
    inputs = (logits, tokens, ancestors, depths, history, lengths, prompt_lengths, sampling, seeds)
    wrap_triton(choose_kernel)[(batch * nodes,)](
        *(tensor.contiguous() for tensor in (*inputs, bias_ids, bias, banned, allowed, masked)),
        nodes,
        ancestors.shape[2],
        history.shape[1],
        biases,
        bans,
        choice,
        scratch,
        V=vocabulary,
        LIST=LIST,
        **blocks(ancestors.shape[2], biases, bans),
    )
    return choice
