# mypy: allow-untyped-defs
"""Cache compaction on a GPU: one program per row, head and cache; one launch for up to eight caches."""

import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.library import wrap_triton

from .blocks import blocks

CACHES_PER_LAUNCH = 8  # K and V of four layers: a launch costs more than moving a few rows


@triton.jit
def compact_kernel(
    lengths, path, accepted,
    path_length, slots, stride_b, stride_h, stride_s, stride_d,
    cache_0, cache_1, cache_2, cache_3, cache_4, cache_5, cache_6, cache_7,
    CACHES: tl.constexpr, D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    which = tl.program_id(2)
    cache = cache_0
    if CACHES > 1:
        cache = tl.where(which == 1, cache_1, cache)
    if CACHES > 2:
        cache = tl.where(which == 2, cache_2, cache)
    if CACHES > 3:
        cache = tl.where(which == 3, cache_3, cache)
    if CACHES > 4:
        cache = tl.where(which == 4, cache_4, cache)
    if CACHES > 5:
        cache = tl.where(which == 5, cache_5, cache)
    if CACHES > 6:
        cache = tl.where(which == 6, cache_6, cache)
    if CACHES > 7:
        cache = tl.where(which == 7, cache_7, cache)
    cache += batch * stride_b + tl.program_id(1).to(tl.int64) * stride_h

    length = tl.load(lengths + batch)
    last = tl.minimum(tl.load(accepted + batch), path_length - 1).to(tl.int32)
    last = tl.where((length >= 0) & (length < slots), last, 0)
    column = tl.arange(0, BLOCK_D)[None, :]
    # Nodes increase along a path, so path[d] >= d. A block of depths d0 <= d < d1 writes slots below length + d1, and
    # a later depth d >= d1 reads length + path[d] >= length + d1: no block reads what an earlier one wrote. Within a
    # block all rows are read, by all warps (hence the barrier), before one is written.
    for start in range(1, last + 1, BLOCK_P):
        depth = start + tl.arange(0, BLOCK_P)
        node = tl.load(path + batch * path_length + depth, mask=depth <= last, other=0)
        source = length + node
        moving = (depth <= last) & (node > depth) & (source < slots)
        mask = moving[:, None] & (column < D)
        rows = tl.load(cache + source[:, None] * stride_s + column * stride_d, mask=mask, other=0)
        tl.debug_barrier()
        tl.store(cache + (length + depth)[:, None] * stride_s + column * stride_d, rows, mask=mask)


@triton.jit
def compact_cache_kernel(
    cache, lengths, path, accepted, path_length, slots, stride_b, stride_h, stride_s, compacted,
    D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One cache, as a TensorRT plugin passes it: an input, and the output that shares its memory."""
    compact_kernel(
        lengths, path, accepted, path_length, slots, stride_b, stride_h, stride_s, 1,
        compacted, None, None, None, None, None, None, None, 1, D, BLOCK_P, BLOCK_D,
    )  # fmt: skip


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two caches can share a launch. Never guards on a symbolic size: unknown counts as different."""
    sizes = zip((*a.shape, *a.stride()), (*b.shape, *b.stride()), strict=True)
    return a.dtype == b.dtype and all(statically_known_true(x == y) for x, y in sizes)


def compact(caches: list[Tensor], lengths: Tensor, path: Tensor, accepted: Tensor) -> None:
    """Launch for `reference.compact`: neighbours of one shape share a launch."""
    group: list[Tensor] = []
    for cache in caches:
        if group and (len(group) == CACHES_PER_LAUNCH or not _alike(cache, group[0])):
            _compact_group(group, lengths, path, accepted)
            group = []
        group.append(cache)
    if group:
        _compact_group(group, lengths, path, accepted)


def _compact_group(caches: list[Tensor], lengths: Tensor, path: Tensor, accepted: Tensor) -> None:
    batch, heads, slots, head_dim = caches[0].shape
    path_length = path.shape[1]
    if path_length == 1:
        return
    wrap_triton(compact_kernel)[(batch, heads, len(caches))](
        lengths.contiguous(),
        path.contiguous(),
        accepted.contiguous(),
        path_length,
        slots,
        *caches[0].stride(),
        *caches,
        *[None] * (CACHES_PER_LAUNCH - len(caches)),
        CACHES=len(caches),
        D=head_dim,
        **blocks(path_length - 1, head_dim),
    )
