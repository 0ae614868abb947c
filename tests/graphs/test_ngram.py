"""The n-gram scorer against a plain search of the history."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specstep.graphs.drafters.ngram import CONFIDENCE, WEIGHTS, Ngram
from specstep.graphs.tree import DynamicTree

SHAPE = DynamicTree(2, 3, 4)


def expand(histories, junk, longest=3, shortest=1, matches=5):
    """Score the roots of rows with these histories; what lies past a row's end is junk that must not matter."""
    slots = 64
    table = torch.full((len(histories), slots), junk)
    for row, history in enumerate(histories):
        table[row, : len(history)] = torch.tensor(history)
    state = {"history": table, "lengths": torch.tensor([len(history) - 1 for history in histories])}
    cache = [torch.zeros(len(histories), 1, slots, 1)]
    scorer = Ngram(longest, shortest, matches)
    first, begun, own = scorer.begin(state, cache, cache, SHAPE)
    assert own == {}
    return first, begun


def search(history, longest, shortest, matches):
    """{token: probability} of what may follow the last tokens of a history."""
    found = []
    end = len(history) - 1
    for place in range(end):
        length = 0
        while length < longest and place - length >= 0 and history[place - length] == history[end - length]:
            length += 1
        found.append((length, place))
    best = sorted(found, reverse=True)[:matches]
    weights = {}
    for length, place in best:
        if length >= shortest:
            weights[history[place + 1]] = weights.get(history[place + 1], 0.0) + WEIGHTS[length]
    total = sum(weights.values())
    return {token: CONFIDENCE[best[0][0]] * weight / total for token, weight in weights.items()}


histories = st.lists(st.integers(0, 4), min_size=1, max_size=40)


@settings(max_examples=200, deadline=None)
@given(st.lists(histories, min_size=1, max_size=3), st.integers(0, 4), st.integers(1, 3), st.integers(1, 3))
def test_scores_are_those_of_a_plain_search(rows, junk, longest, shortest):
    shortest = min(longest, shortest)
    got, _ = expand(rows, junk, longest, shortest)
    for row, history in enumerate(rows):
        expected = search(history, longest, shortest, 5)
        scores = {
            token: math.exp(score)
            for token, score in zip(got.tokens[row, 0].tolist(), got.log_probs[row, 0].tolist(), strict=True)
            if score > -math.inf
        }
        best = sorted(expected.values(), reverse=True)[: SHAPE.top_k]
        assert torch.allclose(torch.tensor(sorted(scores.values(), reverse=True)), torch.tensor(best), atol=1e-6)
        for token, probability in scores.items():
            assert abs(expected[token] - probability) < 1e-6


def test_every_node_asks_for_its_own_continuation():
    history = [1, 2, 3, 9, 1, 2, 4, 8, 1]
    root, begun = expand([history], junk=0)
    assert root.tokens[0, 0, 0] == 2
    level = begun(torch.tensor([[2]]), torch.tensor([[0]]))  # "1 2" was followed by 4, and before that by 3
    assert {4, 3} == set(level.tokens[0, 0, :2].tolist())
    deeper = begun(torch.tensor([[4, 3]]), torch.tensor([[0, 0]]))
    assert deeper.tokens[0, :, 0].tolist() == [8, 9]


def test_no_match_is_an_empty_tree():
    tree = SHAPE.grow(torch.tensor([3]), *expand([[1, 2, 3]], junk=3))
    assert tree.valid.tolist() == [[True] + [False] * SHAPE.nodes]
