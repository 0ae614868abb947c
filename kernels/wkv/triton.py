# mypy: allow-untyped-defs
"""RWKV's attention on a GPU: one program per row and block of channels, which know nothing of each other."""

import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

BLOCK_C = 128


@triton.jit
def taken(state, c, inside, channels):
    """The sums and their exponent at `state`; that of sums that hold nothing is the least."""
    a = tl.load(state + c, mask=inside, other=0.0)
    b = tl.load(state + channels + c, mask=inside, other=0.0)
    p = tl.load(state + 2 * channels + c, mask=inside, other=0.0)
    return a, b, tl.where(b == 0.0, -1e38, p)


@triton.jit
def added(a, b, p, exponent, v):
    """See `reference._added`. A product and a sum are joined where they are written so, and nowhere else: a token has
    the same bits in a chain, in a tree and alone."""
    greatest = tl.maximum(p, exponent, propagate_nan=tl.PropagateNan.ALL)
    kept, new = tl.exp(p - greatest), tl.exp(exponent - greatest)
    return tl.fma(kept, a, new * v), tl.fma(kept, b, new), greatest


@triton.jit(do_not_specialize=["tokens"])
def wkv_kernel(
    key, value, decay, first, state, parents, states, out, tokens, channels, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    fading = tl.load(decay + c, mask=inside, other=0.0)
    more = tl.load(first + c, mask=inside, other=0.0)
    a, b, p = taken(state + row * 3 * channels, c, inside, channels)
    for t in range(tokens):
        token = row * tokens + t
        if parents is not None:
            parent = tl.load(parents + token)
            if parent < 0:
                a, b, p = taken(state + row * 3 * channels, c, inside, channels)
            elif parent != t - 1:
                tl.debug_barrier()
                a, b, p = taken(states + (row * tokens + parent) * 3 * channels, c, inside, channels)
        k = tl.load(key + token * channels + c, mask=inside, other=0.0)
        v = tl.load(value + token * channels + c, mask=inside, other=0.0)
        a_now, b_now, _ = added(a, b, p, more + k, v)
        tl.store(out + token * channels + c, a_now / b_now, mask=inside)
        a, b, p = added(a, b, p + fading, k, v)
        left = states + token * 3 * channels + c
        tl.store(left, a, mask=inside)
        tl.store(left + channels, b, mask=inside)
        tl.store(left + 2 * channels, p, mask=inside)


def wkv(
    key: Tensor, value: Tensor, decay: Tensor, first: Tensor, state: Tensor, parents: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Launch for `reference.wkv`."""
    batch, tokens, channels = key.shape
    out, states = key.new_empty(key.shape), key.new_empty(batch, tokens, 3, channels)
    wrap_triton(wkv_kernel)[(batch, -(-channels // BLOCK_C))](
        key.contiguous(),
        value.contiguous(),
        decay.contiguous(),
        first.contiguous(),
        state.contiguous(),
        None if parents is None else parents.contiguous(),
        states,
        out,
        tokens,
        channels,
        BLOCK_C=BLOCK_C,
    )
    return out, states
