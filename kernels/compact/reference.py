"""Cache compaction in plain torch: the specification.

`compact` writes in place. The ONNX exporter silently drops writes to an input: export `compacted`, which returns a new
cache.
"""

import torch
from torch import Tensor


def moves(lengths: Tensor, path: Tensor, accepted: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Slots to read and to write, int64 [B, P - 1] each and all in range; where nothing moves both are the same.

    A path depth d moves from slot lengths + path[d] to lengths + d when d <= accepted, path[d] > d and the source
    slot exists. Targets are distinct, but for entries without a move that are clamped to the last slot; a real move
    to that slot would need a source beyond it.
    """
    depth = torch.arange(1, path.shape[1], device=path.device)
    start = lengths[:, None]
    source, target = start + path[:, 1:], start + depth
    moving = (depth <= accepted[:, None]) & (path[:, 1:] > depth) & (start >= 0) & (source < slots)
    target = target.clamp(0, slots - 1)
    return torch.where(moving, source, target), target


def compact(caches: list[Tensor], lengths: Tensor, path: Tensor, accepted: Tensor) -> None:
    """Commit the accepted path: K and V at slot lengths + path[d] move to slot lengths + d, for d in 1..accepted.

    Args:
        caches: tensors [B, H, S, D] of any dtype, written in place; no two may overlap. Views of a larger buffer are
            fine. On a GPU one launch serves up to eight caches of one shape, so pass all layers in one call.
        lengths: int64 [B], committed tokens per row: the slot of the root.
        path: int64 [B, P], accepted: int64 [B], from `accept`. Nodes increase along a path, so path[d] >= d; entries
            beyond `accepted` are not read.

    A move whose source lies outside the cache is left out.
    """
    if path.shape[1] == 1:  # a path of the root alone: nothing can move
        return
    for cache in caches:
        at, rows = _gathered(cache, lengths, path, accepted)
        cache.index_put_(at, rows)


def compacted(cache: Tensor, lengths: Tensor, path: Tensor, accepted: Tensor) -> Tensor:
    """One cache [B, H, S, D] after `compact`, as a new tensor."""
    if path.shape[1] == 1:
        return cache.clone()
    at, rows = _gathered(cache, lengths, path, accepted)
    return cache.index_put(at, rows)


def _gathered(cache: Tensor, lengths: Tensor, path: Tensor, accepted: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Indices of the slots to write and the rows [B, H, P - 1, D] to put there, all read before any write."""
    batch, heads, slots, _ = cache.shape
    source, target = moves(lengths, path, accepted, slots)
    b = torch.arange(batch, device=cache.device)[:, None, None]
    h = torch.arange(heads, device=cache.device)[None, :, None]
    return (b, h, target[:, None, :]), cache[b, h, source[:, None, :]]
