# mypy: allow-untyped-defs
"""The best of a node's candidates on a GPU: one program per node, its candidates in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from ..noise_triton import gumbel, natural_log, noise_bits, noise_keys, uniform
from ..order_triton import LAST_TOKEN, ranked, token_of, unordered
from . import reference
from .blocks import blocks

SHARPNESS, LEAST_REST = tl.constexpr(reference.SHARPNESS), tl.constexpr(reference.LEAST_REST)
STEPS_PER_NAT = tl.constexpr(float(reference.STEPS_PER_NAT))
INTEGERS = tl.constexpr(2.0**23)  # from here on a float32 has no fraction


@triton.jit
def _log_sum(scores, rest):
    """The logarithm of the sum of exp over candidates and what is left over."""
    greatest = tl.maximum(tl.max(scores, 0), rest)
    return greatest + natural_log(tl.sum(tl.exp(scores - greatest), 0) + tl.exp(rest - greatest))


@triton.jit
def round_to_even(x):
    """The nearest integer, the even one of two."""
    whole = (tl.abs(x) + INTEGERS) - INTEGERS
    whole = tl.where(tl.abs(x) < INTEGERS, whole, tl.abs(x))
    return tl.where(x < 0, -whole, whole)


@triton.jit
def _sampled(log_q, token, temperature, seed, position):
    """Scores of a sampled row's candidates. See `reference.rank`."""
    rest = natural_log(tl.maximum(1 - tl.sum(tl.exp(log_q), 0), LEAST_REST)) / temperature
    first, second = noise_keys(seed, position)
    plain = log_q / temperature
    noisy = (plain + gumbel(uniform(noise_bits(first, second, token)))) / SHARPNESS
    plain -= _log_sum(plain, rest)
    noisy -= _log_sum(noisy, rest / SHARPNESS)
    return round_to_even((plain + noisy) / 2 * STEPS_PER_NAT) / STEPS_PER_NAT


@triton.jit
def rank_kernel(
    tokens, log_probs, temperature, seeds, positions,
    width,
    best, scores,
    C: tl.constexpr, TOP_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // width).to(tl.int64)
    node = tl.program_id(0).to(tl.int64)
    tokens += node * C
    log_probs += node * C
    place = tl.arange(0, BLOCK_C)
    token = tl.load(tokens + place, mask=place < C, other=0)
    score = tl.load(log_probs + place, mask=place < C, other=float("-inf"))
    score = tl.where(score < float("inf"), score, float("-inf"))
    for earlier in range(C):  # each token once
        before = tl.load(log_probs + earlier)
        if (before > float("-inf")) & (before < float("inf")):
            again = (token == tl.load(tokens + earlier)) & (place > earlier)
            score = tl.where(again, float("-inf"), score)
    warmth = tl.load(temperature + row)
    if warmth > 0:
        score = _sampled(score, token, warmth, tl.load(seeds + row), tl.load(positions + row))

    rank = ranked(score, place)
    none = ranked(tl.full([BLOCK_C], float("-inf"), tl.float32), LAST_TOKEN)
    for n in range(TOP_K):
        most = tl.max(rank, 0)
        value = unordered(most >> 32)
        chosen = token_of(most)
        found = value > float("-inf")
        tl.store(best + node * TOP_K + n, tl.load(tokens + chosen, mask=found, other=0))
        tl.store(scores + node * TOP_K + n, value)
        rank = tl.where(place == chosen, none, rank)


def rank(
    tokens: Tensor, log_probs: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    """Launch for `reference.rank`."""
    batch, width, count = tokens.shape
    best = torch.empty(batch, width, top_k, dtype=torch.int64, device=tokens.device)
    scores = torch.empty(batch, width, top_k, dtype=torch.float32, device=tokens.device)
    inputs = (tokens, log_probs, temperature, seeds, positions)
    wrap_triton(rank_kernel)[(batch * width,)](
        *(tensor.contiguous() for tensor in inputs),
        width,
        best,
        scores,
        C=count,
        TOP_K=top_k,
        **blocks(count),
    )
    return best, scores
