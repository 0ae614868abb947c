"""Bits packed into words."""

import pytest
import torch
from specstep.kernels.bits import chain_bits, pack_bits, unpack_bits


@pytest.mark.parametrize("count", [1, 7, 31, 32, 33, 64, 129])
def test_bits_round_trip(count: int) -> None:
    mask = torch.rand(3, 5, count) < 0.5
    mask[0, 0] = True
    mask[0, 1] = False
    words = pack_bits(mask)
    assert words.dtype == torch.int32
    assert words.shape == (3, 5, -(-count // 32))
    for j in range(count):
        assert torch.equal((words[..., j // 32] >> j % 32) & 1 != 0, mask[..., j])
    assert torch.equal(unpack_bits(words, count), mask)
    assert torch.equal(unpack_bits(torch.full((2,), -1, dtype=torch.int32), 64), torch.ones(64, dtype=torch.bool))


@pytest.mark.parametrize("count", [1, 31, 32, 40])
def test_a_chain_sees_what_came_before(count: int) -> None:
    seen = unpack_bits(chain_bits(count, 2, torch.device("cpu")), count)
    assert torch.equal(seen, torch.ones(count, count, dtype=torch.bool).tril())
