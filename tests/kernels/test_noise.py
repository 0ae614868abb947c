"""The noise: uniform bits, a standard Gumbel, independent over neighbouring seeds, positions and tokens.

Every proof is also put to hashes that are weaker, and must refuse them.
"""

import math

import pytest
import torch
from chi_square import LEAST, normal, uniform
from specstep.kernels import noise
from specstep.kernels.noise import WORD, gumbel, noise_bits

SEEDS, POSITIONS, TOKENS = torch.meshgrid(torch.arange(16), torch.arange(16), torch.arange(512), indexing="ij")
SHIFTS = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 2), (1, 1, 0), (0, 1, -1), (1, -1, 0), (2**32, 0, 0), (0, 0, 2**16)]


def linear(seeds, positions, tokens):
    """A lattice."""
    return (seeds * 0x9E3779B9 + positions * 0x85EBCA6B + tokens * 0x2C1B3C6D) % WORD


def summed(seeds, positions, tokens):
    """What comes of a sum is no more than the sum."""
    return noise_bits(torch.zeros_like(seeds), torch.zeros_like(seeds), seeds + positions + tokens)


def once(seeds, positions, tokens):
    """A single round after the key."""
    return noise._round((noise._key(noise.OFFSETS[0], seeds, positions) + tokens) % WORD)


def shifts_and_sums(seeds, positions, tokens):
    """A usual hash of multiplications, with sums in place of its xors."""

    def mix(word):
        word = (word + word // 2**16) % WORD * 0x7FEB352D % WORD
        word = (word + word // 2**13) % WORD * 0x2C1B3C6D % WORD
        return (word + word // 2**16) % WORD

    return mix((mix((mix(seeds % WORD) + positions) % WORD) + tokens) % WORD)


def bits_are_uniform(bits):
    word = bits(SEEDS, POSITIONS, TOKENS)
    return min(uniform(word // 2**shift % 2**12, 2**12) for shift in (0, 8, 20))


def neighbours_are_independent(bits):
    """Joint bins of high bits, of low bits, and of sums of high and low ones; and differences."""
    word, found = bits(SEEDS, POSITIONS, TOKENS), []
    for shift in SHIFTS:
        other = bits(*(axis + step for axis, step in zip((SEEDS, POSITIONS, TOKENS), shift, strict=True)))
        for a, b in ((26, 26), (0, 0), (26, 0), (13, 13)):
            found.append(uniform(word // 2**a % 64 * 64 + other // 2**b % 64, 64**2))
        found.append(uniform((word - other) % WORD // 2**20, 2**12))
        found.append(uniform((word ^ other) // 2**20, 2**12))
    return min(found)


def three_tokens_are_independent(bits):
    word = bits(SEEDS, POSITIONS, TOKENS) // 2**28
    return uniform((word * 16 + word.roll(-1, 2)) * 16 + word.roll(-2, 2), 16**3)


def any_bit_changes_half_of_them(bits):
    draw = torch.Generator().manual_seed(0)
    given = [torch.randint(0, 2**size - 1, (4096,), generator=draw) for size in (63, 20, 18)]
    word, shares = bits(*given), []
    for place, size in enumerate((63, 20, 18)):
        for bit in range(size):
            changed = [axis ^ (2**bit * (index == place)) for index, axis in enumerate(given)]
            shares.append(((word ^ bits(*changed))[:, None] // 2 ** torch.arange(32) % 2).double().mean(0))
    z = (torch.stack(shares) - 0.5) * 2 * math.sqrt(4096)
    return normal(z.abs().max().item(), z.numel())


def samples_are_independent(bits):
    """What is sampled from a flat distribution over 128 tokens, for neighbouring seeds and positions, by pairs."""
    seeds, positions, tokens = torch.meshgrid(*(torch.arange(size) for size in (64, 64, 128)), indexing="ij")
    best, found = bits(seeds, positions, tokens).argmin(-1), []
    for axis in (0, 1):
        found.append(uniform(best // 16 * 8 + best.roll(-1, axis) // 16, 64))
        found.append(uniform((best - best.roll(-1, axis)) % 128, 128))
    return min(found)


PROOFS = {
    bits_are_uniform: [linear, summed],
    neighbours_are_independent: [linear, summed, once, shifts_and_sums],
    three_tokens_are_independent: [linear, summed, once, shifts_and_sums],
    any_bit_changes_half_of_them: [linear, summed, once, shifts_and_sums],
    samples_are_independent: [linear, summed],
}


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.__name__)
def test_bits(proof):
    assert proof(noise_bits) > LEAST
    for weak in PROOFS[proof]:
        assert proof(weak) < LEAST, weak.__name__


def test_it_is_a_standard_gumbel():
    value = gumbel(SEEDS, POSITIONS, TOKENS).double()
    count, euler = value.numel(), 0.5772156649015329
    assert normal((value.mean() - euler).item() * math.sqrt(6 * count) / math.pi) > LEAST
    fourth = math.pi**4 * (3 / 20 - 1 / 36)  # variance of (x - mean)**2: kurtosis 27 / 5
    spread = ((value - euler) ** 2).mean().item() - math.pi**2 / 6
    assert normal(spread * math.sqrt(count / fourth)) > LEAST
    place = (-(-value).exp()).exp()  # uniform
    assert uniform((place * 4096).long(), 4096) > LEAST
    assert uniform(((place + 0.01).clamp(max=1 - 1e-9) * 4096).long(), 4096) < LEAST
    for axis in range(3):
        together = (value - euler) * (value.roll(1, axis) - euler)
        assert normal(together.mean().item() * math.sqrt(count) / (math.pi**2 / 6)) > LEAST
    highest = value.flatten(1).amax(1)  # over 8192 tokens
    assert normal((highest.mean() - math.log(8192) - euler).item() * math.sqrt(6 * len(highest)) / math.pi) > LEAST


def test_every_word_is_finite_noise_in_the_words_order(monkeypatch):
    """The formula of noise.py in float64, over both ends and between."""
    ends = torch.arange(2**16)
    words = torch.cat([ends, torch.arange(2**16, WORD - 2**16, 65521), WORD - 2**16 + ends])
    monkeypatch.setattr(noise, "noise_bits", lambda *_: words)
    got = gumbel(words, words, words)
    assert got.isfinite().all() and (got[1:] <= got[:-1]).all()
    exact = ((words // 2 + 0.5).double() * 2.0**-31).clamp(max=1 - 2.0**-24)
    torch.testing.assert_close(got.double(), -(-torch.log1p(-exact)).log(), rtol=2e-6, atol=2e-6)


def test_known_noise():
    """What `noise.h` and the other backends' noise are held to as well: a change here is a change of every text."""
    given = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (7, 100, 49151), (2**63 - 1, 2**20, 200000)]
    words = noise_bits(*torch.tensor(given).unbind(1))
    assert words.tolist() == [0x61E7E1B6, 0x87A9CCBF, 0x50B52596, 0xF7FDECBA, 0x18F2E57F, 0x3263A789]
    for (seed, position, token), word in zip(given, words.tolist(), strict=True):
        keys = []
        for key in noise.OFFSETS:
            for part in (seed % WORD, seed >> 32, position):
                key = by_the_book(by_the_book(key + part))
            keys.append(key)
        assert word == by_the_book(by_the_book(by_the_book(keys[0] + token) + keys[1]))


def by_the_book(word):
    word = word * (2 * word + 1) % WORD
    return (word << 16 | word >> 16) % WORD
