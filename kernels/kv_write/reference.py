"""The write of a pass's keys and values in plain torch: the specification, and what a graph says before it is rewritten
for a GPU."""

import torch
from torch import Tensor


def kv_write(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, lengths: Tensor, first: int) -> None:
    """Write keys and values of T tokens into the caches of a layer, in place.

    Args:
        keys, values: [B, H, S, D] and [B, H, S, DV], written; a prefix view of a larger buffer is fine.
        new_keys, new_values: [B, H, T, D] and [B, H, T, DV], of the caches' dtype.
        lengths: int64 [B]. Token t of row b goes to slot lengths[b] + first + t, which is below S.
        first: 0 or more.
    """
    row = torch.arange(lengths.shape[0], device=lengths.device)[:, None, None]
    head = torch.arange(keys.shape[1], device=lengths.device)[:, None]
    slots = lengths[:, None] + first + torch.arange(new_keys.shape[2], device=lengths.device)
    for cache, new in ((keys, new_keys), (values, new_values)):
        cache.index_put_((row, head, slots[:, None]), new)
