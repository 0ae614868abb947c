# mypy: allow-untyped-defs
"""The likeliest tokens on a GPU: one program per place, in one pass over its logits.

Lane l of a program owns the tokens l, l + BLOCK_V, and so on, and remembers its best. The best of all lanes is the next
token; its lane then looks for its next best among the few that it owns, so no pass but the first reads the whole row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from ..noise_triton import gumbel, natural_log, noise_bits, noise_keys, uniform
from ..order_triton import LAST_TOKEN, ranked, token_of
from .blocks import blocks

LEAST = tl.constexpr(-3.4028234663852886e38)  # float32; a maximum of -inf would make NaN of -inf - -inf


@triton.jit
def _key(x, token, there, ids, temperature, first, second, HAS_IDS: tl.constexpr):
    """What tokens are ranked by: their logits, with noise where there is a temperature."""
    if temperature > 0:
        name = tl.load(ids + token, mask=there, other=0) if HAS_IDS else token
        x += temperature * gumbel(uniform(noise_bits(first, second, name)))
    return x


@triton.jit
def _load(logits, allowed, restricted, token, there):
    """Logits of some tokens, -inf for those that are not there or not allowed. Tokens from `restricted` on have no
    mask."""
    word = tl.load(allowed + token // 32, mask=there & (token < restricted), other=-1)
    there &= ((word >> (token % 32)) & 1) != 0
    return tl.load(logits + token, mask=there, other=float("-inf")).to(tl.float32)


@triton.jit
def _add(peak, total, x):
    """Each lane's running maximum and sum of exp(x - peak), with one exponential per logit."""
    ratio = tl.exp(-tl.abs(x - peak))
    return tl.maximum(peak, x), tl.where(x > peak, total * ratio + 1, total + ratio)


@triton.jit
def _find(
    logits, ids, allowed, restricted, temperature, first, second, tokens, log_probs,
    HAS_IDS: tl.constexpr, V: tl.constexpr, TOP: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_TOP: tl.constexpr,
):  # fmt: skip
    """Write the best tokens -> the logarithm of the sum of exp(logits)."""
    lane = tl.arange(0, BLOCK_V)
    best = tl.full([BLOCK_V], float("-inf"), tl.float32)
    found = tl.full([BLOCK_V], LAST_TOKEN, tl.int32)  # a lane without tokens comes after all others
    peak = tl.full([BLOCK_V], LEAST, tl.float32)
    total = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, V, BLOCK_V):
        token = start + lane
        x = _load(logits, allowed, restricted, token, token < V)
        peak, total = _add(peak, total, x)
        key = _key(x, token, token < V, ids, temperature, first, second, HAS_IDS)
        better = (key > best) | ((key == best) & (token < found) & (token < V))
        found = tl.where(better, token, found)
        best = tl.where(better, key, best)
    highest = tl.max(peak, 0)
    norm = highest + natural_log(tl.sum(total * tl.exp(peak - highest), 0))

    place = tl.arange(0, BLOCK_TOP)
    taken = tl.full([BLOCK_TOP], LAST_TOKEN, tl.int32)
    rank = ranked(best, found)
    for n in range(TOP):
        token = token_of(tl.max(rank, 0))
        taken = tl.where(place == n, token, taken)
        mine = token % BLOCK_V + tl.arange(0, BLOCK_L) * BLOCK_V
        there = (mine < V) & (tl.sum((mine[:, None] == taken[None, :]).to(tl.int32), 1) == 0)
        x = _load(logits, allowed, restricted, mine, there)
        key = _key(x, mine, there, ids, temperature, first, second, HAS_IDS)
        left = tl.max(ranked(key, tl.where(there, mine, LAST_TOKEN)), 0)
        rank = tl.where(lane == token % BLOCK_V, left, rank)

    inside = (place < TOP) & (taken < V)
    x = _load(logits, allowed, restricted, taken, inside)
    name = tl.load(ids + taken, mask=inside, other=0) if HAS_IDS else tl.where(inside, taken, 0).to(tl.int64)
    tl.store(tokens + place, name, mask=place < TOP)
    tl.store(log_probs + place, x - norm, mask=place < TOP)
    return norm


@triton.jit
def top_log_probs_kernel(
    logits, nodes, wanted, temperature, seeds, positions, ids, allowed, masked,
    count, places, words,
    tokens, log_probs, total,
    HAS_IDS: tl.constexpr, HAS_MASK: tl.constexpr, V: tl.constexpr, TOP: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_TOP: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64)
    row = (tl.program_id(0) // places).to(tl.int64)
    tokens += entry * TOP
    log_probs += entry * TOP
    if tl.load(wanted + row) != 0:
        node = tl.load(nodes + entry)
        restricted = tl.where(tl.load(masked + row) != 0, V, 0) if HAS_MASK else 0
        first, second = noise_keys(tl.load(seeds + row), tl.load(positions + entry))
        norm = _find(
            logits + (row * count + node) * V, ids, allowed + (row * count + node) * words, restricted,
            tl.load(temperature + row), first, second, tokens, log_probs,
            HAS_IDS, V, TOP, BLOCK_V, BLOCK_L, BLOCK_TOP,
        )  # fmt: skip
    else:
        norm = 0.0
        place = tl.arange(0, BLOCK_TOP)
        tl.store(tokens + place, tl.zeros([BLOCK_TOP], tl.int64), mask=place < TOP)
        tl.store(log_probs + place, tl.full([BLOCK_TOP], float("-inf"), tl.float32), mask=place < TOP)
    tl.store(total + entry, norm)


def top_log_probs(
    logits: Tensor,
    nodes: Tensor,
    wanted: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    ids: Tensor | None,
    top: int,
    allowed: Tensor | None = None,
    masked: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch for `reference.top_log_probs`."""
    batch, count, vocabulary = logits.shape
    places = nodes.shape[1]
    tokens = torch.empty(batch, places, top, dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(batch, places, top, dtype=torch.float32, device=logits.device)
    total = torch.empty(batch, places, dtype=torch.float32, device=logits.device)
    given = (logits, nodes, wanted, temperature, seeds, positions)
    named = nodes if ids is None else ids
    mask = (nodes, nodes) if allowed is None or masked is None else (allowed, masked)
    wrap_triton(top_log_probs_kernel)[(batch * places,)](
        *(tensor.contiguous() for tensor in (*given, named, *mask)),
        count,
        places,
        mask[0].shape[-1],
        tokens,
        log_probs,
        total,
        HAS_IDS=ids is not None,
        HAS_MASK=allowed is not None,
        V=vocabulary,
        TOP=top,
        **blocks(vocabulary, top),
    )
    return tokens, log_probs, total
