"""Kernels on bfloat16, which engines on a GPU use and the interpreter cannot compute with: odd sizes, on a CPU and on a
GPU."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from attention_case import brute_force, make_case
from specstep.controls import BIASES, Sampling
from specstep.kernels.choose.reference import choose
from specstep.kernels.compact.reference import compacted
from specstep.kernels.top_log_probs.reference import top_log_probs
from specstep.kernels.tree_layout.reference import tree_layout
from torch import Tensor

pytestmark = pytest.mark.parametrize("backend", ["op", pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True)
OFF = Sampling(*[0.0] * len(Sampling._fields))
ROWS = [OFF, OFF._replace(temperature=0.7), OFF._replace(temperature=1.0, top_k=5.0, top_p=0.9)]


def on(device: str, tensors: Any) -> list[Any]:
    return [each.to(device) if isinstance(each, Tensor) else each for each in tensors]


@pytest.mark.parametrize(("nodes", "head_dim"), [*product([1, 3, 17, 34, 65], [40, 80, 128, 256]), (3, 512), (34, 512)])
@pytest.mark.parametrize("changes", [{}, {"window": 9}, {"sinks": torch.linspace(-2, 2, 6)}], ids=str)
def test_attention(backend: Any, random_trees: Any, nodes: int, head_dim: int, changes: dict[str, Any]) -> None:
    sizes = {"heads": 6, "kv_heads": 2, "head_dim": head_dim, "lengths": (0, 70, 33)}
    case = replace(make_case(random_trees, nodes=nodes, dtype=torch.bfloat16, seed=nodes, **sizes), **changes)
    got = backend.op("tree_attention")(*case.args(backend.device))
    torch.testing.assert_close(got.cpu().double(), brute_force(case), rtol=4e-2, atol=4e-2)


@pytest.mark.parametrize("size", [5, 64, 80])
def test_caches_are_compacted(backend: Any, size: int) -> None:
    cache = torch.randn(2, 3, 40, size, generator=torch.Generator().manual_seed(0)).bfloat16()
    where = [torch.tensor([3, 17]), torch.tensor([[0, 2, 7], [0, 4, 9]]), torch.tensor([2, 1])]
    wanted, moved = compacted(cache, *where), cache.clone().to(backend.device)
    backend.op("compact")([moved], *on(backend.device, where))
    assert torch.equal(moved.cpu(), wanted) and not torch.equal(cache, wanted)


@pytest.mark.parametrize("vocabulary", [7, 1001, 9473])
def test_choices(backend: Any, vocabulary: int) -> None:
    """Many logits are equal in bfloat16: the lowest id wins."""
    generator, batch, nodes = torch.Generator().manual_seed(vocabulary), len(ROWS), 5
    logits = (torch.randn(batch, nodes, vocabulary, generator=generator) * 3).bfloat16()
    parents = torch.tensor([[-1, 0, 0, 1, 3]]).expand(batch, -1).contiguous()
    ancestors, depths = tree_layout(parents, torch.ones(batch, nodes, dtype=torch.bool))
    tokens, history = (torch.randint(0, vocabulary, (batch, count), generator=generator) for count in (nodes, 12))
    lengths, none = torch.tensor([4, 9, 11]), torch.full((batch, BIASES), -1)
    asked = [torch.tensor(ROWS), torch.tensor([1, 2, 3]), none, none * 0.0, torch.full((batch, nodes, 4), -1)]
    allowed = torch.full((batch, nodes, (vocabulary + 31) // 32), -1, dtype=torch.int32)
    given = [logits, tokens, ancestors, depths, history, lengths, lengths // 2, *asked, allowed, lengths * 0]
    got = backend.op("choose")(*on(backend.device, given)).cpu()
    assert torch.equal(got, choose(*given))
    assert torch.equal(got[0], logits[0].float().argmax(-1))


@pytest.mark.parametrize(("vocabulary", "top"), [(3, 5), (1001, 20), (9473, 4)], ids=str)
def test_likeliest_tokens(backend: Any, vocabulary: int, top: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(2, 4, vocabulary, generator=generator) * 4).bfloat16()
    nodes, positions = (torch.randint(0, 4, (2, 3), generator=generator) for _ in range(2))
    given = [logits, nodes, torch.tensor([1, 7]), torch.tensor([0.8, 0.0]), torch.tensor([5, 6]), positions, None, top]
    bits = torch.randint(-(2**31), 2**31, (2, 4, -(-vocabulary // 32)), generator=generator, dtype=torch.int32)
    given += [bits, torch.tensor([0, 1])]
    got, wanted = backend.op("top_log_probs")(*on(backend.device, given)), top_log_probs(*given)
    assert torch.equal(got[0].cpu(), wanted[0])
    for one, other in zip(got[1:], wanted[1:], strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-5)
