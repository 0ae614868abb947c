"""The choice's kernel against its reference: tokens are equal, whatever rows ask for."""

from typing import Any

import pytest
import torch
from specstep.controls import Sampling
from specstep.kernels import noise
from specstep.kernels.choose.reference import choose, filtered
from specstep.kernels.tree_layout.reference import tree_layout
from torch import Tensor

pytest.importorskip("triton")
import triton
import triton.language as tl
from specstep.kernels.choose.blocks import LIST
from specstep.kernels.choose.threshold_triton import least_kept
from specstep.kernels.noise_triton import gumbel, most_gumbel, noise_bits, noise_keys, uniform

pytestmark = pytest.mark.parametrize(
    "backend", ["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True
)
OFF = Sampling(*[0.0] * len(Sampling._fields))
NODES, SLOTS, BIASES, BANS = 4, 12, 5, 4


@triton.jit
def noise_kernel(seeds, positions, tokens, bits, noises, bounds, N: tl.constexpr):
    i = tl.arange(0, N)
    first, second = noise_keys(tl.load(seeds + i), tl.load(positions + i))
    drawn = noise_bits(first, second, tl.load(tokens + i))
    tl.store(bits + i, drawn.to(tl.int64))
    w = uniform(drawn)
    tl.store(noises + i, gumbel(w))
    tl.store(bounds + i, most_gumbel(w))


def test_the_noise_has_the_same_bits(backend: Any) -> None:
    count, generator = 4096, torch.Generator().manual_seed(0)
    inputs = [torch.randint(0, most, (count,), generator=generator) for most in (2**63 - 1, 2**31, 2**18)]
    seeds, positions, tokens = (tensor.to(backend.device) for tensor in inputs)
    bits, noises, bounds = (
        torch.empty(count, dtype=kind, device=backend.device) for kind in (torch.int64, torch.float32, torch.float32)
    )
    noise_kernel[(1,)](seeds, positions, tokens, bits, noises, bounds, count)
    assert torch.equal(bits, noise.noise_bits(seeds, positions, tokens))
    want = noise.gumbel(seeds, positions, tokens)
    torch.testing.assert_close(noises, want, rtol=3e-7, atol=3e-7)
    assert (bounds > want).all() and (bounds < want + 1).float().mean() > 0.5


def inputs(
    seed: int, vocabulary: int, rows: list[Sampling], device: str, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Random trees, histories and logits; the last row has biases, bans and a mask."""
    generator = torch.Generator().manual_seed(seed)
    batch, few = len(rows), min(vocabulary, 9)

    def draw(least: int, end: int, *shape: int) -> Tensor:
        return torch.randint(least, end, shape, generator=generator)

    logits = torch.randn(batch, NODES, vocabulary, generator=generator) * 3
    parents = (torch.rand(batch, NODES, generator=generator) * torch.arange(NODES)).long()
    parents[:, 0] = -1
    ancestors, depths = tree_layout(parents, torch.ones(batch, NODES, dtype=torch.bool))
    tokens, history = draw(0, few, batch, NODES), draw(0, few, batch, SLOTS)
    ids = torch.stack([torch.randperm(vocabulary, generator=generator)[:BIASES] for _ in rows])
    ids[:, -1] = -1
    bias = torch.randn(batch, BIASES, generator=generator) * 5
    bias[:, 0] = -torch.inf
    banned = draw(-1, vocabulary, batch, NODES, BANS)
    ids[:-1], banned[:-1] = -1, -1
    masked = torch.zeros(batch, dtype=torch.int64)
    masked[-1] = 1
    tensors = [
        logits.to(dtype), tokens, ancestors, depths, history, draw(0, SLOTS, batch), draw(0, SLOTS, batch),
        torch.tensor(rows), draw(0, 2**62, batch), ids, bias, banned,
        draw(-(2**31), 2**31, batch, NODES, (vocabulary + 31) // 32).int(), masked,
    ]  # fmt: skip
    return [tensor.to(device) for tensor in tensors]


ROWS = {
    "greedy": [OFF, OFF],
    "temperature": [OFF._replace(temperature=0.7), OFF._replace(temperature=1.3)],
    "top-k": [OFF._replace(temperature=1.0, top_k=1.0), OFF._replace(temperature=1.0, top_k=5.0)],
    "top-p": [OFF._replace(temperature=1.0, top_p=0.5), OFF._replace(temperature=0.6, top_p=0.95)],
    "min-p": [OFF._replace(temperature=1.0, min_p=0.1), OFF._replace(temperature=0.6, top_p=0.9, min_p=0.02)],
    "penalties": [
        OFF._replace(repetition_penalty=1.7, presence_penalty=0.5),
        OFF._replace(temperature=1.0, repetition_penalty=0.6, presence_penalty=-1.5, frequency_penalty=1.25),
    ],
    "all": [OFF, Sampling(0.8, 40.0, 0.9, 0.01, 1.2, 0.4, 0.3)],
}  # fmt: skip


@pytest.mark.parametrize("vocabulary", [7, 100, LIST + 901])
@pytest.mark.parametrize("asked", ROWS)
def test_choices(backend: Any, asked: str, vocabulary: int) -> None:
    for seed, dtype in enumerate((torch.float32, torch.float16)):
        tensors = inputs(seed, vocabulary, ROWS[asked], backend.device, dtype)
        if seed == 0:  # few tokens are likely, those that rows and trees hold
            tensors[0] = tensors[0] / 3
            tensors[0][:, :, :9] += 5
        assert torch.equal(backend.op("choose")(*tensors), choose(*tensors))


def test_the_lowest_id_wins_and_zeros_are_equal(backend: Any) -> None:
    tensors = inputs(0, 9000, [OFF, OFF._replace(presence_penalty=-0.0001)], backend.device)
    tensors[0] = tensors[0].round().clamp(max=3)
    tensors[0][:, 1] = -0.0
    tensors[0][:, 1, 17] = 0.0
    assert torch.equal(backend.op("choose")(*tensors), choose(*tensors))


def test_where_no_token_is_left_it_is_token_0(backend: Any) -> None:
    row = Sampling(0.8, 3.0, 0.9, 0.01, 1.2, 0.4, 0.3)
    tensors = inputs(0, 40, [OFF, row], backend.device)
    tensors[-2].zero_()
    assert backend.op("choose")(*tensors)[1].tolist() == choose(*tensors)[1].tolist() == [0] * NODES


@triton.jit
def search_kernel(
    values, gathered, peak, low, limit, least, IS_SHARE: tl.constexpr, V: tl.constexpr, LIST: tl.constexpr
):
    found = least_kept(values, gathered, tl.load(low), tl.load(peak), tl.load(limit), IS_SHARE, V, LIST, 1024, 1024)
    tl.store(least, found)


def searched(values: Tensor, limit: float, is_share: bool, low: float = -torch.inf, at_once: int = 256) -> float:
    """The kernel's search, of at most `at_once` values in registers."""
    numbers = [torch.tensor([number], device=values.device) for number in (float(values.max()), low, limit)]
    gathered, least = torch.empty(at_once, device=values.device), torch.empty(1, device=values.device)
    search_kernel[(1,)](values, gathered, *numbers, least, is_share, len(values), at_once)
    return least.item()


def distributions(device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(3072, generator=generator)
    return {
        "peaked": drawn * 5,
        "flat": 20 + drawn * 1e-3,
        "around zero": drawn * 1e-30,
        "coarse": (drawn * 2).round() / 2,
        "equal": torch.full_like(drawn, -1.5),
        "few": torch.where(torch.arange(3072) % 500 == 7, drawn, -torch.inf),
        "far": torch.where(drawn > 2, drawn, drawn - 200),
    }


@pytest.mark.parametrize("name", distributions("cpu"))
def test_the_search_keeps_what_sorting_keeps(backend: Any, name: str) -> None:
    values = distributions(backend.device)[name].to(backend.device)
    order = values.sort(descending=True).values
    for k in (1, 2, 50, 700, 3071, 3072):
        least = searched(values, k, is_share=False)
        assert torch.equal(values >= least, values >= order[k - 1]), (k, least, order[k - 1])
    for low, share in ((-torch.inf, 0.3), (-torch.inf, 0.95), (order[40].item(), 0.5), (order[1].item(), 0.9)):
        least = searched(values, share, is_share=True, low=low)
        weights = ((order - order[0]).double().exp() * (order >= low)).cpu()
        above = weights @ (order[:, None] > values[values >= least].min()).double().cpu()
        below = weights @ (order[:, None] >= least).double().cpu()
        assert above < (share + 1e-5) * weights.sum() and below >= (share - 1e-5) * weights.sum(), (low, share, least)
        limits = torch.tensor([OFF._replace(temperature=1.0, top_p=share, top_k=float((order >= low).sum()))])
        kept = (filtered(values[None, None], limits.to(values.device)) > -torch.inf).sum()
        assert abs(int(kept) - int((values >= max(least, low)).sum())) <= (1 if name != "flat" else 3)
