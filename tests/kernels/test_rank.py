"""The best of a few candidates, against dicts in plain Python."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_rank import ranked
from specstep.kernels.rank import reference

STEPS = reference.STEPS_PER_NAT
shares = st.sampled_from([0.0, 0.02, 0.1, 0.25, 0.4])
candidates = st.lists(st.tuples(st.integers(0, 5), shares), min_size=5, max_size=5)
rows = st.tuples(
    st.lists(candidates, min_size=2, max_size=2), st.sampled_from([0.0, 0.6, 1.0, 3.0]), st.integers(0, 2**62)
)


@pytest.fixture(scope="module")
def op(host):
    return host.op("rank")


@settings(max_examples=80, deadline=None)
@given(st.lists(rows, min_size=1, max_size=3), st.integers(1, 6))
def test_candidates_are_ranked_as_a_dict_is(op, batch, top_k):
    nodes = torch.tensor([row for row, _, _ in batch], dtype=torch.float64)
    tokens, log_q = nodes[..., 0].long(), nodes[..., 1].log().float()
    heats, seeds = torch.tensor([heat for _, heat, _ in batch]), torch.tensor([seed for _, _, seed in batch])
    positions = torch.arange(len(batch)) + 3
    names, scores = (part.tolist() for part in op(tokens, log_q, heats, seeds, positions, top_k))
    for row, (row_nodes, heat, seed) in enumerate(batch):
        for node, given_candidates in enumerate(row_nodes):
            expected = ranked(given_candidates, heat, seed, positions[row].item())
            got = [(t, s) for t, s in zip(names[row][node], scores[row][node], strict=True) if s > -math.inf]
            assert len({token for token, _ in got}) == len(got) == min(top_k, len(expected))
            for token, score in got:
                assert score == pytest.approx(expected[token], abs=2 / STEPS)
            best = sorted(expected.values(), reverse=True)[: len(got)]
            assert [score for _, score in got] == pytest.approx(best, abs=2 / STEPS)
            assert names[row][node][len(got) :] == [0] * (top_k - len(got))
            if not heat:  # the first among equals, in the scores' own bits
                order = sorted(expected, key=lambda token: -expected[token])  # stable: in the order of their coming
                assert [token for token, _ in got] == order[:top_k]


def test_it_is_its_reference(op):
    """Candidates of a real size: some twice, some equal, some not there."""
    draw = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 30, (4, 8, 24), generator=draw)
    log_q = (torch.randn(4, 8, 24, generator=draw).log_softmax(-1) * 16).round() / 16
    log_q = log_q.masked_fill(torch.rand(4, 8, 24, generator=draw) < 0.2, -math.inf)
    log_q[1, 3] = -math.inf
    heats, seeds = torch.tensor([0.0, 0.7, 1.0, 2.5]), torch.tensor([0, 1, 2**40, 2**63 - 1])
    for top_k in (1, 8, 30):
        given = (tokens, log_q, heats, seeds, torch.arange(4), top_k)
        names, scores = op(*given)
        expected = reference.rank(*given)
        assert torch.equal(names, expected[0])
        torch.testing.assert_close(scores, expected[1], rtol=0, atol=1.01 / STEPS)  # one step, by another sum


def test_what_is_no_number_is_no_candidate(op):
    """It hides neither the others of its node nor those of other nodes."""
    tokens, nothing = torch.tensor([[[7, 3, 7, 5], [7, 3, 7, 5]]]).expand(2, -1, -1), -math.inf
    log_q = torch.tensor([[[math.nan, -1.0, -2.0, math.inf], [-0.5, -1.0, nothing, -3.0]]]).expand(2, -1, -1)
    finite = torch.tensor([[[nothing, -1.0, -2.0, nothing], [-0.5, -1.0, nothing, -3.0]]]).expand(2, -1, -1)
    heats, seeds, positions = torch.tensor([0.0, 0.8]), torch.tensor([1, 2]), torch.tensor([5, 6])
    names, scores = op(tokens, log_q, heats, seeds, positions, 4)
    expected = op(tokens, finite, heats, seeds, positions, 4)
    assert torch.equal(names, expected[0]) and torch.equal(scores, expected[1])
    assert names[0].tolist() == [[3, 7, 0, 0], [7, 3, 5, 0]]
