"""Cache writes against a loop over tokens."""

from typing import Any

import pytest
import torch
from specstep.kernels.kv_write.op import kv_write as kv_write_op
from torch import Tensor


def make(sizes: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> list[Any]:
    """Two rows of three heads in prefix views of larger caches, and four tokens as a projection leaves them."""
    generator = torch.Generator().manual_seed(seed)
    caches = [torch.randn(2, 3, 20, size, generator=generator).to(dtype)[:, :, :17] for size in sizes]
    joined = torch.randn(2, 4, 3, sum(sizes), generator=generator).to(dtype)
    new = [part.transpose(1, 2) for part in joined.split(sizes, 3)]
    return [*caches, *new, torch.tensor([0, 10]), 3]


def brute_force(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, lengths: Tensor, first: int
) -> list[Tensor]:
    written = [keys.clone(), values.clone()]
    for cache, new in zip(written, (new_keys, new_values), strict=True):
        for b, length in enumerate(lengths.tolist()):
            for t in range(new.shape[2]):
                cache[b, :, length + first + t] = new[b, :, t]
    return written


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(8, 8), (12, 12), (24, 16), (5, 33)], ids=str)
def test_every_token_lands_in_its_slot(backend: Any, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    if backend.name == "onnx":
        pytest.skip("an ONNX graph keeps index_put")
    given = [one.to(backend.device) if isinstance(one, Tensor) else one for one in make(sizes, dtype)]
    expected = brute_force(*make(sizes, dtype))
    backend.op("kv_write")(*given)
    for got, want in zip(given[:2], expected, strict=True):
        assert torch.equal(got.cpu(), want)


def test_opcheck() -> None:
    torch.library.opcheck(kv_write_op, tuple(make((8, 8), torch.float32)))


def test_refusals_name_expected_and_got() -> None:
    keys, values, new_keys, new_values, *where = make((8, 8), torch.float32)
    with pytest.raises(ValueError, match=r"new_values: expected \[2, 3, 4, 8\] of torch.float32, got \[2, 3, 4, 7\]"):
        kv_write_op(keys, values, new_keys, new_values[..., :7], *where)
    with pytest.raises(ValueError, match=r"new_keys: expected .* of torch.float32, got .* of torch.float16"):
        kv_write_op(keys, values, new_keys.half(), new_values, *where)
