# mypy: allow-untyped-defs
"""Floats as integers of the same order, for kernels that search and select."""

import triton
import triton.language as tl

LAST_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def ordered(value):
    """int32 that is the greater, the greater the float32."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def unordered(key):
    """The inverse of `ordered`, of an integer in its range."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def ranked(value, token):
    """int64 that is the greater, the greater the value, and among equal values the lower the token."""
    return (ordered(value + 0.0).to(tl.int64) << 32) + (LAST_TOKEN - token)  # -0.0 + 0.0 is 0.0


@triton.jit
def token_of(rank):
    """The token of `ranked`, int32."""
    return LAST_TOKEN - (rank & LAST_TOKEN).to(tl.int32)


@triton.jit
def best_token(value, token):
    """Of a block: the token with the greatest value, the lowest among equals."""
    return token_of(tl.max(ranked(value, token), 0))
