"""Gumbel noise as a function of (seed, position, token): a counter-based hash, so that draft and target share it.

32-bit arithmetic on int64, by products, sums, quotients and remainders alone, which every backend has; `noise.h` and
`noise.triton` are the same in uint32. Sources: the Gumbel-max trick; Daliri et al. 2024 (arXiv 2408.07978) for drafts.
"""

import torch
from torch import Tensor

WORD = 2**32
FACTORS = (0x21F0AAAD, 0x7FEB352D, 0x2C1B3C6D)  # odd and below 2**31: a product with a word stays inside int64
OFFSETS = (0x9E3779B9, 0x85EBCA6B)
LEAST_SERIES = 2.0**-6  # below it -log(1 - w) is taken from its series: 1 - w would lose the low bits of w
GREATEST = 1.0 - 2.0**-24


def gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, of the three's common shape. int64 each: seeds in [0, 2**63), the position at which
    a token would stand in its sequence, and the token."""
    w = ((noise_bits(seeds, positions, tokens) // 2).float() + 0.5) * 2.0**-31
    w = w.clamp(max=GREATEST)  # in the open interval (0, 1)
    series = w * (1 + w * (1 / 2 + w * (1 / 3 + w * (1 / 4 + w * (1 / 5)))))
    exponential = torch.where(w < LEAST_SERIES, series, -(1 - w).log())
    return -exponential.log()


def noise_bits(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """32 random bits, as int64."""
    key = _mix(seeds % WORD + OFFSETS[0])
    key = _mix(key + seeds // WORD % WORD)
    key = _mix(key + positions)
    other = _mix(key + OFFSETS[1])
    mixed = (_mix(tokens * FACTORS[0] + key) + other) % WORD * FACTORS[1] % WORD
    return (mixed + mixed // 2**16) % WORD


def _mix(word: Tensor) -> Tensor:
    """A word of which every bit depends on every bit of the one given, that may be larger than a word."""
    word = word % WORD
    word = (word + word // 2**16) % WORD * FACTORS[1] % WORD
    word = (word + word // 2**13) % WORD * FACTORS[2] % WORD
    return (word + word // 2**16) % WORD
