"""Merged scorers: the mixture against a dict, and exact output whatever they draft."""

import math

import pytest
import specstep
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import greedy, save_eagle3, save_model, tiny_model
from safetensors.torch import load_file, save_file
from specstep.graphs.drafters.best import best_of
from specstep.graphs.drafters.drafter import Drafter
from specstep.graphs.drafters.merged import Merged
from specstep.graphs.drafters.ngram import Ngram
from specstep.graphs.kept import CacheLayer
from specstep.graphs.prefill import Prefill
from specstep.graphs.state import row_state
from specstep.graphs.step import SpeculativeStep
from specstep.graphs.tree import Candidates, DynamicTree
from specstep.kernels.rank.reference import STEPS_PER_NAT

PROMPTS = [[5], [7, 8], [40, 41, 42] * 9, list(range(30, 83))]

scores = st.lists(
    st.tuples(st.integers(0, 6), st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.25])),
    min_size=3,
    max_size=3,
    unique_by=lambda candidate: candidate[0],
)


@settings(max_examples=200, deadline=None)
@given(st.lists(scores, min_size=2, max_size=3), st.integers(1, 4))
def test_a_mixture_is_that_of_a_dict(given_scores, top_k):
    merged = Merged([Ngram() for _ in given_scores])
    candidates = [
        Candidates(torch.tensor([[[token for token, _ in each]]]), torch.tensor([[[p for _, p in each]]]).log())
        for each in given_scores
    ]
    sure = [max(probability for _, probability in each) for each in given_scores]
    mixture = {}
    for each, weight in zip(given_scores, sure, strict=True):
        for token, probability in each:
            if probability:
                mixture[token] = mixture.get(token, 0.0) + weight / sum(sure) * probability
    got = best_of(merged._mix(candidates), top_k)
    found = [(t, s) for t, s in zip(got.tokens[0, 0].tolist(), got.log_probs[0, 0].tolist(), strict=True) if s > -1e9]
    assert len({token for token, _ in found}) == len(found) == min(top_k, len(mixture))
    best = sorted(mixture.values(), reverse=True)[:top_k]
    for (token, score), probability in zip(found, best, strict=True):
        assert abs(score - math.log(probability)) <= 1 / STEPS_PER_NAT
        assert abs(mixture[token] - probability) < 1e-6


@pytest.mark.parametrize("tree", [{}, {"tree": "chain", "nodes": 3}, {"tree": "static", "nodes": 7}], ids=str)
@pytest.mark.parametrize("kind", ["ngram,head", "head,small", "ngram,small,head"])
def test_output_equals_transformers(kind, tree, tmp_path):
    target = save_model(tmp_path / "target")
    save_eagle3(tmp_path / "head")
    save_model(tmp_path / "small", seed=1, num_hidden_layers=2, hidden_size=32)
    model = tiny_model("Llama")
    expected = [greedy(model, prompt, 30, [1]) for prompt in PROMPTS]
    drafter = ",".join(name if name == "ngram" else str(tmp_path / name) for name in kind.split(","))
    engine = specstep.eager(str(target), drafter=drafter, dtype="float32", max_batch=4, max_seq_len=96, **tree)
    assert [result.token_ids for result in engine.generate(PROMPTS, 30)] == expected


@pytest.mark.parametrize("kind", ["small", "head", "ngram,small,head"])
def test_tokens_past_a_drafters_vocabulary(kind, tmp_path):
    """Members of one family pad their vocabularies differently: the target knows ids that the drafter has no embedding
    for. They come in the prompt, in the output and as drafts of the other scorers."""
    target = save_model(tmp_path / "target", tokenizer=True)
    save_model(tmp_path / "small", tokenizer=True, seed=1, num_hidden_layers=2, vocab_size=300)
    tensors = load_file(save_eagle3(tmp_path / "head") / "model.safetensors")
    save_file(tensors | {"embed_tokens.weight": torch.randn(300, 48)}, tmp_path / "head" / "model.safetensors")
    model, prompts = tiny_model("Llama"), [[319], [5, 310, 7, 319] * 4, [*range(290, 320)] * 2]
    drafter = ",".join(name if name == "ngram" else str(tmp_path / name) for name in kind.split(","))
    engine = specstep.eager(str(target), drafter=drafter, dtype="float32", max_batch=2, max_seq_len=96)
    results = engine.generate(prompts, 25, ignore_eos=True)
    assert [result.token_ids for result in results] == [greedy(model, prompt, 25) for prompt in prompts]


def test_a_merged_tree_takes_from_both(tmp_path):
    """The target itself as a draft model is right at every node: a mixture with n-grams must keep nearly all of it."""
    target = str(save_model(tmp_path / "target"))
    given = {"dtype": "float32", "max_seq_len": 96, "tree": "dynamic", "nodes": 12, "depth": 4, "top_k": 4}
    alone, both = (specstep.eager(target, drafter=names, **given) for names in (target, f"ngram,{target}"))
    steps = [sum(result.stats["steps"] for result in engine.generate(PROMPTS, 40)) for engine in (alone, both)]
    assert steps[1] <= steps[0] * 1.25


def own_state(scorer, shape):
    """What an empty row has of a scorer's own state."""
    return {name: torch.full((1, *t.shape), t.fill, dtype=t.dtype) for name, t in scorer.state(shape).items()}


def test_neural_scorers_are_asked_on_the_first_levels_alone():
    class Counting(Ngram):
        def __init__(self, neural):
            super().__init__()
            self.neural, self.levels = neural, 0

        def begin(self, *given):
            first, expand, own = super().begin(*given)
            self.levels = 1

            def counted(*level):
                self.levels += 1
                return expand(*level)

            return first, counted, own

    state = {"history": torch.arange(64)[None] % 5, "lengths": torch.tensor([40])}
    state |= {"sampling": torch.zeros(1, 7), "seeds": torch.tensor([0])}
    state |= {"prediction": torch.zeros(1, 64, dtype=torch.int64), "prediction_lengths": torch.tensor([0])}
    cache, shape = [torch.zeros(1, 1, 64, 1)], DynamicTree(5, 3, 9)
    for kinds, expected in (([False, True], [5, 2]), ([True, True], [5, 5])):
        scorers = [Counting(neural) for neural in kinds]
        merged = Merged(scorers)
        Drafter(merged, shape)(state | own_state(merged, shape), cache, cache)
        assert [scorer.levels for scorer in scorers] == expected


def test_each_scorer_is_handed_its_own_cache_layers():
    class Recording(Ngram):
        def __init__(self, *sizes):
            super().__init__()
            self.sizes, self.got = sizes, []

        def cache_layers(self):
            return [CacheLayer(1, size, size + 1) for size in self.sizes]

        def begin(self, state, keys, values, shape):
            self.got.append((tuple(key.shape[3] for key in keys), tuple(value.shape[3] for value in values)))
            return super().begin(state, keys, values, shape)

        def prefill(self, tokens, count, where, state, keys, values, features):
            self.got.append((tuple(key.shape[3] for key in keys), tuple(value.shape[3] for value in values)))
            return super().prefill(tokens, count, where, state, keys, values, features)

    class OneLayer(torch.nn.Module):
        layers = 1

        def forward(self, tokens, where, keys, values):
            assert len(keys) == len(values) == 1
            return torch.zeros(*tokens.shape, 5), None

    scorers, shape = [Recording(2, 3), Recording(), Recording(7)], DynamicTree(2, 2, 3)
    keys, values = ([torch.zeros(1, 1, 64, size + extra) for size in (9, 2, 3, 7)] for extra in (0, 1))
    state = {name: torch.full((1, *t.shape), t.fill, dtype=t.dtype) for name, t in row_state(100, 3, 5).items()}
    for merged in (Merged(scorers), Merged([Merged(scorers[:2]), scorers[2]])):
        drafter, every = Drafter(merged, shape), state | own_state(merged, shape)
        SpeculativeStep(OneLayer(), drafter)(torch.arange(4), every, keys, values)
        Prefill(OneLayer(), merged, 8)(torch.zeros(1, 4, dtype=torch.int64), torch.tensor([4]), every, keys, values)
    expected = [((2, 3), (3, 4)), ((), ()), ((7,), (8,))]
    assert [scorer.got for scorer in scorers] == [[sizes] * 4 for sizes in expected]


def test_each_scorer_gets_its_own_features_and_state():
    class Recording(Ngram):
        def __init__(self, *layers):
            super().__init__()
            self.feature_layers, self.got = layers, []

        def commit(self, state, path, features):
            self.got.append(features)
            return {"kept": torch.tensor(len(self.feature_layers))}

    scorers = [Recording(4, 1), Recording(), Recording(2)]
    merged, features = Merged(scorers), torch.arange(2 * 3 * 15.0).view(2, 3, 15)
    state = merged.commit({}, torch.zeros(2, 1), features)
    assert merged.feature_layers == (4, 1, 2)
    assert torch.equal(scorers[0].got[0], features[..., :10]) and scorers[1].got == [None]
    assert torch.equal(scorers[2].got[0], features[..., 10:])
    assert [merged._states(state)[place]["kept"].item() for place in range(3)] == [2, 0, 1]


def test_a_mixture_is_neural_where_one_of_its_scorers_is():
    class Neural(Ngram):
        neural = True

    kinds = [[Ngram(), Ngram()], [Ngram(), Neural()], [Ngram(), Merged([Ngram()])], [Merged([Neural()])]]
    assert [Merged(scorers).neural for scorers in kinds] == [False, True, False, True]
