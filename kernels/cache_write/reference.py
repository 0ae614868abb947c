"""What a cache write is: ONNX's ScatterND over the first three dimensions of a cache."""

from torch import Tensor


def cache_write(cache: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    """cache [B, H, S, D] with rows [..., D] at indices [..., 3] int64 (batch, head, slot) -> the new cache.

    An index outside the cache is an error here; the kernel leaves it out.
    """
    return cache.index_put(tuple(indices.unbind(-1)), rows)
