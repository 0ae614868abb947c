"""The kernel that ranks candidates against its reference."""

from typing import Any

import pytest
import torch
from specstep.kernels.rank.reference import STEPS_PER_NAT, rank
from torch import Tensor

pytest.importorskip("triton")

pytestmark = pytest.mark.parametrize(
    "backend", ["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True
)
BATCH, WIDTH = 4, 3
HEATS = [0.8, 0.0, 3.0, 1e-3]


def inputs(count: int, names: int, device: str) -> list[Tensor]:
    """Candidates of `names` tokens, a fifth of them missing, some no numbers; one node has none. Greedy rows and
    sampled ones."""
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randint(0, names, (BATCH, WIDTH, count), generator=generator)
    log_q = (torch.randn(BATCH, WIDTH, count + 1, generator=generator) * 2).log_softmax(-1)[:, :, :-1]
    log_q[torch.rand(log_q.shape, generator=generator) < 0.2] = -torch.inf
    log_q[0, 1] = -torch.inf
    log_q[:2, 2, 0], log_q[2, 0, -1] = torch.nan, torch.inf  # none, either
    seeds = torch.randint(0, 2**62, (BATCH,), generator=generator)
    return [each.to(device) for each in (tokens, log_q, torch.tensor(HEATS), seeds, torch.arange(BATCH) * 1000)]


def check(backend: Any, tensors: list[Tensor], top_k: int) -> None:
    """Scores may round to the next step."""
    got, want = backend.op("rank")(*tensors, top_k), rank(*tensors, top_k)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=1.01 / STEPS_PER_NAT)
    assert torch.equal(got[1][1], want[1][1])  # a greedy row's are not computed with
    steps = (got[1][tensors[2] > 0] * STEPS_PER_NAT).nan_to_num(neginf=0)
    assert torch.equal(steps, steps.round())


@pytest.mark.parametrize(("count", "top_k"), [(1, 1), (3, 5), (10, 4), (33, 33), (100, 10), (300, 64)], ids=str)
@pytest.mark.parametrize("names", [6, 50000])
def test_random_candidates(backend: Any, count: int, top_k: int, names: int) -> None:
    check(backend, inputs(count, names, backend.device), top_k)


def test_of_equal_scores_the_first_comes_first(backend: Any) -> None:
    tensors = inputs(40, 50000, backend.device)
    tensors[1] = (tensors[1].clamp(min=-50) / 2).round() * 2
    tensors[2] = tensors[2] * 0
    check(backend, tensors, 20)


def test_a_token_counts_where_it_is_first(backend: Any) -> None:
    """Not where it is missing, and not where it is likelier."""
    tensors = inputs(8, 50000, backend.device)
    tensors[0][...] = torch.tensor([7, 7, 7, 9, 9, 4, 4, 7], device=backend.device)
    shares = torch.tensor([0.0, 0.1, 0.3, 0.05, 0.2, 0.0, 0.0, 0.1])
    tensors[1][...] = shares.log().to(backend.device)
    check(backend, tensors, 4)
    names, scores = backend.op("rank")(*tensors, 4)
    assert names[1].tolist() == [[7, 9, 0, 0]] * WIDTH
    assert (scores[:, :, 2:] == -torch.inf).all()
