# mypy: allow-untyped-defs
"""Cache write on a GPU: a block of rows per program."""

import triton
import triton.language as tl


@triton.jit
def cache_write_kernel(
    cache, indices, rows, batch, heads, slots, count, written,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`written` is the memory of `cache`. Indices are (batch, head, slot); one outside the cache is left out."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    used = row < count
    b = tl.load(indices + row * 3, mask=used, other=-1)
    h = tl.load(indices + row * 3 + 1, mask=used, other=-1)
    s = tl.load(indices + row * 3 + 2, mask=used, other=-1)
    inside = (b >= 0) & (b < batch) & (h >= 0) & (h < heads) & (s >= 0) & (s < slots)
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = inside[:, None] & (column < D)
    values = tl.load(rows + row[:, None] * D + column, mask=mask, other=0)
    tl.store(written + ((b * heads + h) * slots + s)[:, None] * D + column, values, mask=mask)
