"""`specstep::compact`."""

from torch import Tensor

from ..registration import traced_op
from . import reference


@traced_op("specstep::compact", mutates_args=("caches",))
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
    if any(cache.dim() != 4 for cache in caches):
        raise ValueError(f"caches: expected [B, H, S, D] tensors, got shapes {[tuple(c.shape) for c in caches]}")
    if lengths.is_cuda:
        from . import triton

        return triton.compact(caches, lengths, path, accepted)
    return reference.compact(caches, lengths, path, accepted)


@traced_op("specstep::compacted")
def compacted(cache: Tensor, lengths: Tensor, path: Tensor, accepted: Tensor) -> Tensor:
    """One cache after `compact`, as a new tensor: what ONNX is given, which has no writes in place."""
    return reference.compacted(cache, lengths, path, accepted)
