# mypy: allow-untyped-defs
"""Linear attention on a GPU: one program per row, head and a block of a value's columns, which know nothing of each
other. A chain's state stays in registers; in a tree, each token leaves its own for those that follow it."""

import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from .blocks import blocks


@triton.jit
def decayed(state, decay, rates, n, p, N: tl.constexpr, P: tl.constexpr, DECAYS: tl.constexpr):
    """state [N, P] times the factors at `decay`, N or one; with rates [N, P], times exp(rates * steps), whose P steps
    are at `decay`."""
    if rates is not None:
        factors = tl.exp(rates * tl.load(decay + p, mask=p < P, other=0.0)[None])
    elif DECAYS == 1:
        factors = tl.load(decay)
    else:
        factors = tl.load(decay + n, mask=n < N, other=0.0)[:, None]
    return state * factors


@triton.jit
def rates_of(rates, head, of_state, inside, N: tl.constexpr, P: tl.constexpr):
    """The rates [N, P] of a head, if there are any. One return: Triton compiles what follows one in an if, too."""
    if rates is None:  # noqa: SIM108 (what is in the branch that is not taken would be compiled)
        found = None
    else:
        found = tl.load(rates + head * N * P + of_state, mask=inside, other=0.0)
    return found


@triton.jit
def column_sums(x, weights, zero):
    """Sums over the rows of x [N, P] times weights [N]. zero: 0 as an argument, which the compiler cannot know. It is
    added to each product, so that no multiplication is joined with an addition, as it would be in one kernel and not in
    another: a token has the same bits in a chain, in a tree and alone."""
    weights = tl.broadcast_to(weights[:, None], x.shape)
    return tl.sum(tl.fma(x, weights, tl.full(x.shape, 0.0, tl.float32) + zero), 0)


@triton.jit(do_not_specialize=["tokens", "heads", "groups", "zero"])
def linear_attention_kernel(
    query, key, value, decay, rates, beta, state, parents, states, out, update, tokens, heads, groups, zero,
    N: tl.constexpr, P: tl.constexpr, DECAYS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)  # of the row and head
    row, head = place // heads, place % heads
    group = head // (heads // groups)
    n, p = tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    of_state, inside = n[:, None] * P + p, (n[:, None] < N) & (p < P)
    first = tl.load(state + place * N * P + of_state, mask=inside, other=0.0)
    current = first
    exponents = rates_of(rates, head, of_state, inside, N, P)
    for t in range(tokens):
        token = row * tokens + t
        if parents is not None:
            parent = tl.load(parents + token)
            if parent < 0:
                current = first
            elif parent != t - 1:
                tl.debug_barrier()
                current = tl.load(states + ((place * tokens + parent) * N * P) + of_state, mask=inside, other=0.0)
        at = token * heads + head
        k = tl.load(key + (token * groups + group) * N + n, mask=n < N, other=0.0)
        q = tl.load(query + (token * groups + group) * N + n, mask=n < N, other=0.0)
        u = tl.load(value + at * P + p, mask=p < P, other=0.0)
        current = decayed(current, decay + at * DECAYS, exponents, n, p, N, P, DECAYS)
        if beta is not None:
            u = (u - column_sums(current, k, zero)) * tl.load(beta + at)
        current = tl.fma(tl.broadcast_to(k[:, None], current.shape), tl.broadcast_to(u[None], current.shape), current)
        if parents is not None:
            tl.store(states + (place * tokens + t) * N * P + of_state, current, mask=inside)
        tl.store(update + at * P + p, u, mask=p < P)
        tl.store(out + at * P + p, column_sums(current, q, zero), mask=p < P)


def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rates: Tensor | None, beta: Tensor | None,
    state: Tensor, parents: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch for `reference.linear_attention`."""
    batch, tokens, heads, p = value.shape
    groups, n = key.shape[2:]
    out, update = value.new_empty(value.shape), value.new_empty(value.shape)
    states = None if parents is None else value.new_empty(batch, heads, tokens, n, p)
    sizes = blocks(n, p)
    wrap_triton(linear_attention_kernel)[(batch * heads, -(-p // sizes["BLOCK_P"]))](
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        decay.contiguous(),
        None if rates is None else rates.contiguous(),
        None if beta is None else beta.contiguous(),
        state.contiguous(),
        None if parents is None else parents.contiguous(),
        states,
        out,
        update,
        tokens,
        heads,
        groups,
        0,
        N=n,
        P=p,
        DECAYS=decay.shape[3],
        **sizes,
    )
    return out, update
