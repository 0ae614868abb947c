"""The kernel of the likeliest tokens against its reference."""

from typing import Any

import pytest
import torch
from specstep.kernels.top_log_probs.reference import top_log_probs
from torch import Tensor

pytest.importorskip("triton")
from specstep.kernels.top_log_probs.blocks import BLOCK_V

pytestmark = pytest.mark.parametrize(
    "backend", ["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True
)
BATCH, NODES, PLACES = 3, 4, 2


def inputs(vocabulary: int, device: str, named: bool, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    """Rows with noise, without, and one that is left out."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(BATCH, NODES, vocabulary, generator=generator) * 4).to(dtype)
    nodes, positions = (torch.randint(0, NODES, (BATCH, PLACES), generator=generator) for _ in range(2))
    seeds = torch.randint(0, 2**62, (BATCH,), generator=generator)
    wanted, temperature = torch.tensor([1, 7, 0]), torch.tensor([0.8, 0.0, 0.8])
    ids = torch.randperm(vocabulary + 50, generator=generator)[:vocabulary] if named else None
    tensors = (logits, nodes, wanted, temperature, seeds, positions, ids)
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def check(backend: Any, tensors: list[Any], top: int) -> None:
    got, want = backend.op("top_log_probs")(*tensors, top), top_log_probs(*tensors, top)
    assert torch.equal(got[0], want[0])
    for one, other in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("named", [False, True], ids=["own", "named"])
@pytest.mark.parametrize(
    ("vocabulary", "top"), [(3, 5), (33, 1), (1000, 20), (BLOCK_V + 5, 4), (3 * BLOCK_V, 64)], ids=str
)
def test_random_logits(backend: Any, vocabulary: int, top: int, named: bool) -> None:
    check(backend, inputs(vocabulary, backend.device, named), top)


def test_masked_rows(backend: Any) -> None:
    """The first of them has a mask, also of the lane whose best it takes away; the second has none."""
    tensors: list[Any] = inputs(2 * BLOCK_V + 37, backend.device, named=True)
    draw = torch.Generator().manual_seed(9)
    words = -(-tensors[0].shape[2] // 32)
    bits = torch.randint(-(2**31), 2**31, (BATCH, NODES, words), generator=draw, dtype=torch.int32)
    bits[0, 0] &= 0
    bits[0, 0, 3] = 1 << 7  # one token alone
    mask = [bits.to(backend.device), torch.tensor([1, 0, 1], device=backend.device)]
    got, want = (op(*tensors, 20, *mask) for op in (backend.op("top_log_probs"), top_log_probs))
    assert torch.equal(got[0], want[0]) and not torch.equal(got[0], top_log_probs(*tensors, 20)[0])
    for one, other in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_of_equal_logits_the_lowest_index_comes_first(backend: Any) -> None:
    tensors: list[Any] = inputs(2 * BLOCK_V + 9, backend.device, named=False, dtype=torch.float16)
    tensors[0] = tensors[0].round().clamp(max=8)
    tensors[3] = tensors[3] * 0
    tensors[0][1, :, :BLOCK_V] = -torch.inf
    check(backend, tensors, 20)


def test_tokens_that_cannot_be_come_last(backend: Any) -> None:
    tensors: list[Any] = inputs(40, backend.device, named=True)
    tensors[0][:, :, ::3] = -torch.inf
    check(backend, tensors, 40)


def test_the_best_tokens_of_one_lane_are_found(backend: Any) -> None:
    """The greatest logits are all a block apart."""
    tensors: list[Any] = inputs(6 * BLOCK_V + 100, backend.device, named=False)
    tensors[0][..., 77::BLOCK_V] += 40
    check(backend, tensors, 9)
