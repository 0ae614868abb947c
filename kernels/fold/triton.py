# mypy: allow-untyped-defs
"""Committing the accepted path of linear attention on a GPU: one program per row, head and a block of columns."""

import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from ..linear_attention.blocks import blocks
from ..linear_attention.triton import decayed, rates_of


@triton.jit
def fold_kernel(
    state, key, decay, rates, update, path, count, tokens, places, heads, groups,
    N: tl.constexpr, P: tl.constexpr, DECAYS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)  # of the row and head
    row, head = place // heads, place % heads
    group = head // (heads // groups)
    n, p = tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    own, inside = state + place * N * P + n[:, None] * P + p, (n[:, None] < N) & (p < P)
    exponents = rates_of(rates, head, n[:, None] * P + p, inside, N, P)
    current = tl.load(own, mask=inside, other=0.0)
    last = tl.minimum(tl.load(count + row), places).to(tl.int32)
    for step in range(last):
        token = row * tokens + tl.load(path + row * places + step)
        at = token * heads + head
        k = tl.load(key + (token * groups + group) * N + n, mask=n < N, other=0.0)
        u = tl.load(update + at * P + p, mask=p < P, other=0.0)
        current = decayed(current, decay + at * DECAYS, exponents, n, p, N, P, DECAYS)
        current = tl.fma(tl.broadcast_to(k[:, None], current.shape), tl.broadcast_to(u[None], current.shape), current)
    tl.store(own, current, mask=inside)


def fold(
    state: Tensor, key: Tensor, decay: Tensor, rates: Tensor | None, update: Tensor, path: Tensor, count: Tensor
) -> None:
    """Launch for `reference.fold`."""
    batch, tokens, heads, p = update.shape
    groups, n = key.shape[2:]
    sizes = blocks(n, p)
    wrap_triton(fold_kernel)[(batch * heads, -(-p // sizes["BLOCK_P"]))](
        state,
        key.contiguous(),
        decay.contiguous(),
        None if rates is None else rates.contiguous(),
        update.contiguous(),
        path.contiguous(),
        count.contiguous(),
        tokens,
        path.shape[1],
        heads,
        groups,
        N=n,
        P=p,
        DECAYS=decay.shape[3],
        **sizes,
    )
