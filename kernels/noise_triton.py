# mypy: allow-untyped-defs
"""The noise of `noise.py` on a GPU, in uint32: the same bits, and the same numbers but for their last bit."""

import triton
import triton.language as tl

from . import noise

FIRST, SECOND = tl.constexpr(noise.OFFSETS[0]), tl.constexpr(noise.OFFSETS[1])
LEAST_SERIES, GREATEST = tl.constexpr(noise.LEAST_SERIES), tl.constexpr(noise.GREATEST)
LN_2 = tl.constexpr(0.6931471805599453)
LN_2_HIGH, LN_2_LOW = tl.constexpr(0.693145751953125), tl.constexpr(1.428606820309417e-06)  # the first has few bits


@triton.jit
def _noise_round(word):
    word *= 2 * word + 1
    return (word >> 16) | (word << 16)


@triton.jit
def _noise_key(offset: tl.constexpr, seed, position):
    key = _noise_round(_noise_round(seed.to(tl.uint32) + offset))
    key = _noise_round(_noise_round(key + (seed >> 32).to(tl.uint32)))
    return _noise_round(_noise_round(key + position.to(tl.uint32)))


@triton.jit
def noise_keys(seed, position):
    """The two words that all tokens of a position share. seed and position: int64."""
    return _noise_key(FIRST, seed, position), _noise_key(SECOND, seed, position)


@triton.jit
def noise_bits(first, second, token):
    """32 random bits of a token, from its position's keys."""
    return _noise_round(_noise_round(_noise_round(first + token.to(tl.uint32)) + second))


@triton.jit
def uniform(bits):
    """In the open interval (0, 1): the noise is the greater, the less this is."""
    return tl.minimum(((bits >> 1).to(tl.float32) + 0.5) * (2.0**-31), GREATEST)


@triton.jit
def gumbel(w):
    """Standard Gumbel noise from `uniform`."""
    series = w * (1 + w * (1 / 2 + w * (1 / 3 + w * (1 / 4 + w * (1 / 5)))))
    return -natural_log(tl.where(w < LEAST_SERIES, series, -natural_log(1 - w)))


@triton.jit
def most_gumbel(w):
    """At least `gumbel(w)`, by up to 0.7 more, without a logarithm: that of the power of 2 below w."""
    return (127 - (w.to(tl.int32, bitcast=True) >> 23)).to(tl.float32) * LN_2 + 0.01


@triton.jit
def natural_log(x):
    """Natural logarithm of normal numbers above 0, to the last bit or two; Triton's own is off by 1e-5 of the result
    near x = 1. x = 2**e (1 + f) with 1 + f between sqrt(1/2) and sqrt(2), and log(1 + f) = 2 atanh(f / (2 + f))."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1
    s = f / (2 + f)
    z = s * s
    rest = z * (2 / 3 + z * (2 / 5 + z * (2 / 7 + z * (2 / 9))))
    half = 0.5 * f * f
    e = exponent.to(tl.float32)
    return e * LN_2_HIGH - ((half - (s * (half + rest) + e * LN_2_LOW)) - f)
