"""`specstep::kv_write`. See `reference.kv_write`. It stays one node until `compile.inductor.gpu_writes` lowers it."""

import torch
from torch import Tensor

from . import reference


def _check(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, lengths: Tensor) -> None:
    for name, cache, new in (("new_keys", keys, new_keys), ("new_values", values, new_values)):
        expected = (lengths.shape[0], cache.shape[1], new_keys.shape[2], cache.shape[3])
        if tuple(new.shape) != expected or new.dtype != cache.dtype:
            raise ValueError(
                f"{name}: expected {list(expected)} of {cache.dtype}, got {list(new.shape)} of {new.dtype}"
            )


@torch.library.custom_op(
    "specstep::kv_write", mutates_args=("keys", "values"), tags=(torch.Tag.flexible_layout,)
)  # any strides
def kv_write(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, lengths: Tensor, first: int) -> None:
    """See `reference.kv_write`."""
    _check(keys, values, new_keys, new_values, lengths)
    reference.kv_write(keys, values, new_keys, new_values, lengths, first)


@kv_write.register_fake
def _(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, lengths: Tensor, first: int) -> None:
    _check(keys, values, new_keys, new_values, lengths)
