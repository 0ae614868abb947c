"""Drafts of sampled rows: the best of a few candidates and of a whole distribution, against dicts in plain Python."""

import math

import pytest
import torch
from plain_rank import ranked
from specstep.graphs.drafters.best import best_of
from specstep.graphs.drafters.drafter import Drafter, Scorer
from specstep.graphs.drafters.shared_noise import BestTokens, Ranking
from specstep.graphs.state import row_state
from specstep.graphs.step import SpeculativeStep
from specstep.graphs.tree import Candidates, DynamicTree, chain
from specstep.kernels.noise import gumbel
from specstep.report import RUNNING, Report


def test_best_of_keeps_the_scores():
    given_candidates = Candidates(torch.tensor([[[4, 7, 4, 2]]]), torch.tensor([[[-1.0, -0.5, -0.1, -math.inf]]]))
    got = best_of(given_candidates, 3)
    assert got.tokens.tolist() == [[[7, 4, 0]]] and got.log_probs.tolist() == [[[-0.5, -1.0, -math.inf]]]


def request_state(temperatures, lengths=None):
    batch, declared = len(temperatures), row_state(64, 12, VOCABULARY)
    state = {name: torch.full((batch, *t.shape), t.fill, dtype=t.dtype) for name, t in declared.items()}
    state["sampling"][:, 0], state["seeds"] = torch.tensor(temperatures), torch.arange(batch) * 1000 + 1
    state["lengths"] = torch.arange(batch) if lengths is None else torch.full((batch,), lengths)
    return state


VOCABULARY = 40
IDS = torch.randperm(90, generator=torch.Generator().manual_seed(1))[:VOCABULARY]


@pytest.mark.parametrize("ids", [None, IDS], ids=["own", "named"])
def test_best_tokens_are_the_likeliest_and_the_noisiest(ids):
    """For the levels in turn, whose tokens stand one place further each; the noise is that of the target's names."""
    heats = [0.0, 0.7, 2.0]
    best = BestTokens(request_state(heats), 3, ids)
    for level in (1, 2, 3):
        logits = torch.randn(3, 2, VOCABULARY, generator=torch.Generator().manual_seed(level))
        got = best(logits)
        names = list(range(VOCABULARY)) if ids is None else ids.tolist()
        for row, heat in enumerate(heats):
            for node in range(2):
                log_q = logits[row, node].log_softmax(0).tolist()
                noise = gumbel(torch.tensor(1000 * row + 1), torch.tensor(row + level), torch.tensor(names)).tolist()
                keys = [log_q, [q + heat * g for q, g in zip(log_q, noise, strict=True)]]
                orders = [sorted(range(VOCABULARY), key=lambda index: -key[index])[:3] for key in keys]
                expected = [names[index] for order in orders for index in order]
                scores = [log_q[index] for order in orders for index in order]
                if not heat:
                    expected[3:], scores[3:] = [0] * 3, [-math.inf] * 3
                assert got.tokens[row, node].tolist() == expected
                assert got.log_probs[row, node].tolist() == pytest.approx(scores, abs=1e-5)


def test_levels_are_ranked_with_the_noise_of_their_own_places():
    ranking = Ranking(request_state([1.0, 0.0, 1.0]), 2)
    for level in (1, 2, 3):
        shares = [(3, 0.2), (9, 0.19), (4, 0.21), (9, 0.19)]
        tokens, log_q = (torch.tensor(part).expand(3, 1, 4) for part in zip(*shares, strict=True))
        got = ranking(Candidates(tokens, log_q.log()))
        for row, heat in enumerate((1.0, 0.0, 1.0)):
            scores = ranked(shares, heat, 1000 * row + 1, row + level)
            order = sorted(scores, key=lambda token: -scores[token])
            assert got.tokens[row, 0].tolist() == order[:2]


class Known(Scorer):
    """Scores with a table of logits, [V, V] or per row [B, V, V]."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def begin(self, state, keys, values, shape):
        best = BestTokens(state, shape.top_k)

        def expand(tokens, parents):
            return best(self.table[tokens])

        root = state["history"].gather(1, state["lengths"][:, None])
        return expand(root, root), expand, {}


TABLE = 1.5 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(4))
CACHE = [torch.zeros(1, 1, 64, 1)]


def test_a_greedy_rows_tree_is_the_same_beside_sampled_rows():
    """In a batch of all kinds, and where all are greedy; and the sampled ones differ."""
    drafter = Drafter(Known(TABLE), DynamicTree(3, 3, 8))
    mixed, plain = (request_state(heats, 5) for heats in ([0.0, 1.0, 0.0, 0.4], [0.0] * 4))
    trees = [drafter(state, CACHE, CACHE)[0] for state in (mixed, plain)]
    for name in ("tree_tokens", "tree_parents"):
        assert torch.equal(trees[0][name][[0, 2]], trees[1][name][[0, 2]])
    assert not torch.equal(trees[0]["tree_tokens"][[1, 3]], trees[1]["tree_tokens"][[1, 3]])


class Table(torch.nn.Module):
    layers = 0

    def forward(self, tokens, where, keys, values):
        return TABLE[tokens], None


class Blind(Drafter):
    """Drafts as for a greedy row: what is likely, whatever the noise."""

    def forward(self, state, keys, values):
        return super().forward(state | {"sampling": torch.zeros_like(state["sampling"])}, keys, values)


def tokens_per_step(drafter, temperature, count=300):
    state = request_state([temperature] * count, 0)
    state["history"][:, 0] = torch.arange(count) % VOCABULARY
    state["limits"][:], state["finish"][:] = 60, RUNNING
    nodes = drafter.shape.nodes + 1
    state |= {"tree_tokens": state["tree_tokens"][:, :nodes], "tree_parents": state["tree_parents"][:, :nodes]}
    state |= {"allowed": state["allowed"][:, :nodes]} | drafter(state, CACHE, CACHE)[0]
    step, found = SpeculativeStep(Table(), drafter), []
    for _ in range(4):
        report, after = step(torch.arange(nodes), state, CACHE, CACHE)
        state |= after
        found.append(report[:, Report._fields.index("count")].float().mean().item())
    return sum(found) / len(found)


@pytest.mark.parametrize(
    "shape", [chain(3), DynamicTree(3, 3, 9), DynamicTree(2, 4, 12)], ids=["chain", "deep", "wide"]
)
def test_who_knows_the_noise_is_right_more_often(shape):
    """A drafter whose distribution is the target's, at temperature 1: 3 tokens of a step in place of 1.3 to 1.8."""
    knows, blind = (tokens_per_step(kind(Known(TABLE), shape), 1.0) for kind in (Drafter, Blind))
    assert knows > 1.5 * blind
    assert tokens_per_step(Drafter(Known(TABLE), shape), 0.0) == tokens_per_step(Blind(Known(TABLE), shape), 0.0)
