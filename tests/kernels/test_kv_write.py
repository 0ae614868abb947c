"""Cache writes against a loop over tokens."""

from typing import Any

import pytest
import torch
from specstep.compile.inductor.gpu_writes import lower_writes
from specstep.kernels.kv_write.op import kv_write as kv_write_op
from torch import Tensor
from torch._inductor.utils import run_and_get_code

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


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
def test_every_token_lands_in_its_slot(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    given = make(sizes, dtype)
    expected = brute_force(*make(sizes, dtype))
    kv_write_op(*given)
    for got, want in zip(given[:2], expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_compiler_stores_what_it_computes_where_it_lies(device: str, dtype: torch.dtype) -> None:
    """Any numbers of rows and tokens, caches that are views, values that are slices: no memory but the caches'."""
    lower_writes()

    def write(keys: Tensor, values: Tensor, joined: Tensor, lengths: Tensor) -> None:
        new_keys, new_values = (part.transpose(1, 2) for part in joined.split((8, 12), 3))
        kv_write_op(keys, values, -new_keys, new_values, lengths, 3)

    compiled = torch.compile(write, fullgraph=True, dynamic=True)
    for rows, tokens in ((2, 4), (3, 5), (4, 2)):
        caches = [torch.randn(rows, 3, 20, size, device=device).to(dtype)[:, :, :17] for size in (8, 12)]
        joined = torch.randn(rows, tokens, 3, 20, device=device).to(dtype)
        lengths = torch.randint(0, 9, (rows,), device=device)
        new = [part.transpose(1, 2) for part in joined.split((8, 12), 3)]
        expected = brute_force(*caches, -new[0], new[1], lengths, 3)
        _, codes = run_and_get_code(compiled, *caches, joined, lengths)
        assert all("empty_strided" not in body(code) for code in codes) and (codes or rows > 2)
        for got, want in zip(caches, expected, strict=True):
            assert torch.equal(got, want)


def body(code: str) -> str:
    """Generated code from its first call on."""
    return code[code.index("def call(") : code.index("return", code.index("def call("))]


def test_opcheck() -> None:
    torch.library.opcheck(kv_write_op, tuple(make((8, 8), torch.float32)))


def test_refusals_name_expected_and_got() -> None:
    keys, values, new_keys, new_values, *where = make((8, 8), torch.float32)
    with pytest.raises(ValueError, match=r"new_values: expected \[2, 3, 4, 8\] of torch.float32, got \[2, 3, 4, 7\]"):
        kv_write_op(keys, values, new_keys, new_values[..., :7], *where)
    with pytest.raises(ValueError, match=r"new_keys: expected .* of torch.float32, got .* of torch.float16"):
        kv_write_op(keys, values, new_keys.half(), new_values, *where)
