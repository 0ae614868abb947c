"""Cache compaction against a loop over rows."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specstep.kernels.compact.op import compact as compact_op
from specstep.kernels.compact.reference import compacted
from torch import Tensor


def brute_force(cache: Tensor, lengths: Tensor, path: Tensor, accepted: Tensor) -> Tensor:
    result = cache.clone()
    for b, length in enumerate(lengths.tolist()):
        for d in range(1, int(accepted[b]) + 1):
            source = length + int(path[b, d])
            if length >= 0 and source < cache.shape[2]:
                result[b, :, length + d] = cache[b, :, source]
    return result


def random_paths(batch: int, levels: int, nodes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Increasing node lists that start at the root, with garbage beyond the accepted length."""
    path = torch.randint(-5, 2 * nodes, (batch, levels), generator=generator)
    accepted = torch.randint(0, min(levels, nodes), (batch,), generator=generator)
    for b in range(batch):
        chosen = torch.randperm(nodes - 1, generator=generator)[: accepted[b]].sort().values + 1
        path[b, 0] = 0
        path[b, 1 : 1 + len(chosen)] = chosen
    return path, accepted


def make_cache(shape: tuple[int, int, int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A prefix view of a larger buffer."""
    batch, heads, slots, head_dim = shape
    buffer = torch.randint(-100, 100, (batch, heads, slots + 3, head_dim), generator=generator).to(dtype)
    return buffer[:, :, :slots]


def check(backend: Any, caches: list[Tensor], lengths: Tensor, path: Tensor, accepted: Tensor) -> None:
    expected = [brute_force(cache, lengths, path, accepted) for cache in caches]
    moved = [cache.clone(memory_format=torch.preserve_format).to(backend.device) for cache in caches]
    for cache, want in zip(caches, expected, strict=True):
        assert torch.equal(compacted(cache, lengths, path, accepted), want)
    backend.op("compact")(moved, *(x.to(backend.device) for x in (lengths, path, accepted)))
    for index, (cache, want) in enumerate(zip(moved, expected, strict=True)):
        assert torch.equal(cache.cpu(), want), f"cache {index}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize("nodes", [2, 8, 34, 65, 130])
def test_random_paths(backend: Any, dtype: torch.dtype, nodes: int) -> None:
    generator = torch.Generator().manual_seed(nodes)
    slots = nodes + 20
    lengths = torch.tensor([0, 5, 20, 11, slots, slots + 4, slots - 2, -1])  # also full and overfull rows
    path, accepted = random_paths(8, min(nodes, 40), nodes, generator)
    accepted[0] = 0
    caches = [make_cache((8, 2, slots, 5), dtype, generator) for _ in range(2)]
    check(backend, caches, lengths, path, accepted)


def test_chain_is_the_identity_and_last_nodes_move_far(backend: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    cache = make_cache((2, 1, 40, 8), torch.float32, generator)
    path = torch.stack((torch.arange(34), torch.arange(34)))
    path[1, 1:4] = torch.tensor([31, 32, 33])
    check(backend, [cache], torch.tensor([3, 6]), path, torch.tensor([33, 3]))


@pytest.mark.parametrize("count", [1, 3, 9, 17])
def test_many_caches(backend: Any, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    path, accepted = random_paths(3, 5, 9, generator)
    caches = [make_cache((3, 1 + i // 6, 16, 8), torch.float32, generator) for i in range(count)]
    check(backend, caches, torch.tensor([0, 4, 7]), path, accepted)


def test_writes_reach_the_buffer_and_nothing_else(backend: Any) -> None:
    buffer = torch.arange(2 * 12 * 3 * 4.0).reshape(2, 12, 3, 4).to(backend.device)  # [B, S, H, D]
    view = buffer.transpose(1, 2)[:, :, :10]
    lengths, path, accepted = torch.tensor([2, 4]), torch.tensor([[0, 2, 5], [0, 3, 9]]), torch.tensor([2, 1])
    want = buffer.cpu().clone()
    want[0, 3], want[0, 4], want[1, 5] = want[0, 4].clone(), want[0, 7].clone(), want[1, 7].clone()
    backend.op("compact")([view], *(x.to(backend.device) for x in (lengths, path, accepted)))
    assert torch.equal(buffer.cpu(), want)


def test_root_only_path(backend: Any) -> None:
    cache = torch.ones(1, 1, 4, 2)
    check(backend, [cache], torch.tensor([1]), torch.zeros(1, 1, dtype=torch.int64), torch.tensor([0]))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), nodes=st.integers(2, 20), levels=st.integers(2, 22), spare=st.integers(-6, 6))
def test_any_path(backend: Any, seed: int, nodes: int, levels: int, spare: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    path, accepted = random_paths(2, levels, nodes, generator)
    cache = make_cache((2, 1, nodes + 6, 2), torch.int32, generator)
    check(backend, [cache], torch.tensor([6 - spare, 6]).clamp(min=0), path, accepted)


def test_opcheck() -> None:
    generator = torch.Generator().manual_seed(0)
    path, accepted = random_paths(3, 5, 9, generator)
    caches = [make_cache((3, 2, 16, 8), torch.float32, generator).contiguous() for _ in range(3)]
    torch.library.opcheck(compact_op, (caches, torch.tensor([0, 4, 7]), path, accepted))
