"""Gumbel noise as a function of (seed, position, token): a counter-based hash, so that draft and target share it.

32-bit arithmetic on int64, by products, sums, quotients and remainders alone, which every backend has; `noise.h` and
`noise_triton.py` are the same in uint32. A round is that of RC6 (Rivest et al., 1998): the quadratic permutation x (2x
+ 1) and a rotation by half a word. Shifts and sums in place of the usual shifts and xors would not do: sums are linear
but for their carries, so the noise of neighbouring tokens would be related. Sources: the Gumbel-max trick; Daliri et
al. 2024 (arXiv 2408.07978) for drafts.
"""

import torch
from torch import Tensor

WORD = 2**32
OFFSETS = (0x9E3779B9, 0x85EBCA6B)  # from which the two words of a key start
LEAST_SERIES = 2.0**-6  # below it -log(1 - w) is taken from its series: 1 - w would lose the low bits of w
GREATEST = 1.0 - 2.0**-24


def gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, of the three's common shape. int64 each: seeds in [0, 2**63), the position at
    which a token would stand in its sequence, and the token."""
    w = ((noise_bits(seeds, positions, tokens) // 2).float() + 0.5) * 2.0**-31
    w = w.clamp(max=GREATEST)  # in the open interval (0, 1)
    series = w * (1 + w * (1 / 2 + w * (1 / 3 + w * (1 / 4 + w * (1 / 5)))))
    exponential = torch.where(w < LEAST_SERIES, series, -(1 - w).log())
    return -exponential.log()


def noise_bits(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """32 random bits, as int64."""
    first, second = (_key(offset, seeds, positions) for offset in OFFSETS)
    return _round(_round((_round((first + tokens) % WORD) + second) % WORD))


def _key(offset: int, seeds: Tensor, positions: Tensor) -> Tensor:
    """A word for each seed and position."""
    key = _round(_round((seeds % WORD + offset) % WORD))
    for given in (seeds // WORD, positions):
        key = _round(_round((key + given) % WORD))
    return key


def _round(word: Tensor) -> Tensor:
    """A permutation of the words: x (2x + 1), its halves exchanged. The square's part that a word holds is
    low * (2x - low), which stays inside int64."""
    low = word % 2**16
    square = low * (2 * word - low)
    word = (2 * square + word) % WORD
    return word // 2**16 + word % 2**16 * 2**16
