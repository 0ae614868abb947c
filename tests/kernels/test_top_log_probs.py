"""The likeliest tokens, with and without noise: against a sort in plain Python, ties to the lowest index."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specstep.kernels.noise import gumbel
from specstep.kernels.top_log_probs import reference

logits = st.lists(st.sampled_from([-math.inf, -3.0, 0.0, 0.5, 2.0, 7.5]), min_size=6, max_size=6)


@pytest.fixture(scope="module")
def op(host):
    return host.op("top_log_probs")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(logits, min_size=3, max_size=3), min_size=1, max_size=3),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.6, 2.0]),
    st.integers(1, 8),
    st.booleans(),
    st.integers(0, 2**63 - 1),
    st.none() | st.lists(st.integers(0, 63), min_size=3, max_size=3),
)
def test_they_are_those_of_a_sort(op, rows, nodes, temperature, top, named, seed, allowed):
    """allowed: bits of each node's tokens, for every row but the second; None for no masks at all."""
    batch, ids = len(rows), torch.tensor([9, 3, 4, 100, 51, 0]) if named else None
    wanted = torch.arange(batch) % 3 != 1
    positions = torch.arange(batch * len(nodes)).view(batch, -1) + 7
    some = torch.tensor([nodes]).expand(batch, -1).contiguous()
    heat, seeds = torch.full((batch,), temperature), torch.full((batch,), seed)
    masked = torch.arange(batch) != 1
    mask = [] if allowed is None else [torch.tensor([allowed] * batch, dtype=torch.int32)[..., None], masked.long()]
    got = op(torch.tensor(rows), some, wanted.long(), heat, seeds, positions, ids, top, *mask)
    tokens, log_probs, totals = (part.tolist() for part in got)
    for row in range(batch):
        for place, node in enumerate(nodes):
            bits = allowed[node] if mask and masked[row] else 63
            kept = [bool(bits >> index & 1) and bool(wanted[row]) for index in range(6)]
            mine = [logit if keep else -math.inf for logit, keep in zip(rows[row][node], kept, strict=True)]
            weight = math.fsum(math.exp(logit) for logit in mine)
            if not weight:
                if not wanted[row]:
                    assert totals[row][place] == 0.0 and tokens[row][place] == [0] * top
                    assert log_probs[row][place] == [-math.inf] * top
                continue
            total = math.log(weight)
            assert totals[row][place] == pytest.approx(total, abs=1e-5)
            names = list(range(6)) if ids is None else ids.tolist()
            noise = gumbel(seeds[row], positions[row, place], torch.tensor(names)).tolist()
            key = [x + temperature * g if temperature else x for x, g in zip(mine, noise, strict=True)]
            order = sorted(range(6), key=lambda index: (-key[index], index))[:top]
            missing = top - len(order)
            assert tokens[row][place] == [names[index] for index in order] + [0] * missing
            expected = [mine[index] - total for index in order] + [-math.inf] * missing
            assert log_probs[row][place] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_it_is_its_reference(host, op, dtype):
    """In a vocabulary with many ties, rows left out among the others."""
    if host.name == "onnx" and dtype == torch.bfloat16:
        pytest.skip("NumPy, and so ONNX Runtime's Python, has no bfloat16")
    draw = torch.Generator().manual_seed(3)
    some = (4 * torch.randn(4, 5, 1003, generator=draw)).to(dtype)
    nodes, positions = torch.tensor([[0, 3, 3, 1]] * 4), torch.arange(16).view(4, 4)
    some_bits = torch.randint(-(2**31), 2**31, (4, 5, 32), generator=draw, dtype=torch.int32)
    seeds, names = torch.tensor([1, 2, 2**40, 4]), torch.randperm(2000, generator=draw)[:1003].sort().values
    for wanted in (torch.tensor([1, 0, 1, 1]), torch.zeros(4, dtype=torch.int64)):
        for heat in (torch.zeros(4), torch.tensor([1.0, 1.0, 0.0, 0.6])):
            for ids in (None, names):
                for mask in ((), (some_bits, torch.tensor([1, 1, 0, 1]))):
                    given = (some, nodes, wanted, heat, seeds, positions, ids, 20, *mask)
                    for mine, expected in zip(op(*given), reference.top_log_probs(*given), strict=True):
                        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
