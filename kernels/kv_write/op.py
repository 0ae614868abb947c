"""`specstep::kv_write`. See `reference.kv_write`."""

from typing import Any

from torch import Tensor

from ..registration import traced_op
from . import reference


def _check(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, lengths: Tensor, first: int) -> None:
    for name, cache, new in (("new_keys", keys, new_keys), ("new_values", values, new_values)):
        expected = (lengths.shape[0], cache.shape[1], new_keys.shape[2], cache.shape[3])
        if tuple(new.shape) != expected or new.dtype != cache.dtype:
            raise ValueError(
                f"{name}: expected {list(expected)} of {cache.dtype}, got {list(new.shape)} of {new.dtype}"
            )


def _triton(*arguments: Any) -> Any:
    from . import triton

    return triton.kv_write(*arguments)


kv_write = traced_op(
    "specstep::kv_write", reference.kv_write, cuda=_triton, check=_check, mutates_args=("keys", "values")
)
