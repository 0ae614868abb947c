"""The n-gram scorer against a plain search of the history, and the hashed tables against a dict."""

import math
import random

import pytest
import specstep
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import greedy, save_model, tiny_model
from specstep.compile.drafters import choose
from specstep.graphs.drafters import ngram_tables
from specstep.graphs.drafters.best import likeliest
from specstep.graphs.drafters.ngram import CONCENTRATIONS, Ngram
from specstep.graphs.drafters.ngram_tables import NgramTables, pack
from specstep.graphs.tree import DynamicTree
from specstep.kernels.ngram import tables as layout
from specstep.kernels.ngram.tables import home

SHAPE = DynamicTree(2, 3, 4)
MATCHES = 5


def unpredicted(lengths, junk):
    """What the state says of a prediction for rows that have none."""
    none = torch.zeros_like(lengths)
    return {"prediction": none[:, None] + junk, "prediction_lengths": none, "prediction_offset": none}


def begin(scorer, histories, junk, shape=SHAPE):
    """Score the roots of rows with these histories; what lies past a row's end is junk that must not matter."""
    slots = 64
    table = torch.full((len(histories), slots), junk)
    for row, history in enumerate(histories):
        table[row, : len(history)] = torch.tensor(history)
    state = {"history": table, "lengths": torch.tensor([len(history) - 1 for history in histories])}
    state |= unpredicted(state["lengths"], junk)
    cache = [torch.zeros(len(histories), 1, slots, 1)]
    first, expand, own = scorer.begin(state, cache, cache, shape)
    assert own["prediction_offset"].tolist() == [0] * len(histories), "nothing is predicted"
    return first, expand


def search(history, bigrams, trigrams, concentrations=CONCENTRATIONS):
    """{token: probability} of what may follow a history."""
    end, found = len(history) - 1, []
    for place in range(end):
        length = 0
        while length < 4 and place - length >= 0 and history[place - length] == history[end - length]:
            length += 1
        found.append((length, place))
    best = [(length, history[place + 1]) for length, place in sorted(found, reverse=True)[:MATCHES] if length]
    pair = tuple(history[-2:])
    known = trigrams.get(pair, bigrams.get(history[-1], {}))
    probabilities = {token: known.get(token, 0.0) for token in [*known, *(token for _, token in best)]}
    for least, concentration in sorted(concentrations.items()):
        total = sum(length >= least for length, _ in best)
        for token in probabilities:
            count = sum(length >= least and token == follow for length, follow in best)
            probabilities[token] = (count + concentration * probabilities[token]) / (total + concentration)
    return probabilities


def make_tables(bigrams, trigrams, vocabulary, width=3):
    """{token: {next: probability}} and {pair: {next: probability}} -> tables."""

    def entries(row):
        row = sorted(row.items()) + [(-1, 1.0)] * (width - len(row))
        return pack(torch.tensor([token for token, _ in row]), torch.tensor([p for _, p in row]))

    pairs = torch.tensor(list(trigrams), dtype=torch.int32).view(-1, 2)
    rows = [entries(row) for row in trigrams.values()] or [torch.zeros(0, width, dtype=torch.int32)]
    return NgramTables(
        torch.stack([entries(bigrams.get(token, {})) for token in range(vocabulary)]),
        pairs,
        torch.stack(rows) if trigrams else rows[0],
    )


levels = st.integers(0, 80).map(lambda level: math.exp(-level / 16))  # probabilities that the tables hold exactly
tokens = st.integers(0, 4)
rows = st.dictionaries(tokens, levels, min_size=1, max_size=3)
histories = st.lists(tokens, min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(histories, min_size=1, max_size=3),
    tokens,
    st.dictionaries(tokens, rows, max_size=5),
    st.dictionaries(st.tuples(tokens, tokens), rows, max_size=8),
    st.booleans(),
)
def test_scores_are_those_of_a_plain_search(batch, junk, bigrams, trigrams, with_tables):
    if not with_tables:
        bigrams, trigrams = {}, {}
    scorer = Ngram(make_tables(bigrams, trigrams, 5) if with_tables else None, matches=MATCHES)
    got, _ = begin(scorer, batch, junk)
    for row, history in enumerate(batch):
        expected = search(history, bigrams, trigrams)
        scored = zip(got.tokens[row, 0].tolist(), got.log_probs[row, 0].tolist(), strict=True)
        scores = {token: math.exp(score) for token, score in scored if score > -math.inf}
        best = sorted((p for p in expected.values() if p > 0), reverse=True)[: 2 * SHAPE.top_k]
        assert sorted(scores.values(), reverse=True) == pytest.approx(best, rel=1e-3)
        assert scores == pytest.approx({token: expected[token] for token in scores}, rel=1e-3)


def test_every_node_asks_for_its_own_continuation():
    history = [1, 2, 3, 9, 1, 2, 4, 8, 1]
    root, expand = begin(Ngram(), [history], junk=0)
    assert root.tokens[0, 0, 0] == 2
    level = expand(torch.tensor([[2]]), torch.tensor([[0]]))  # "1 2" was followed by 4, and before that by 3
    assert {4, 3} == set(level.tokens[0, 0, :2].tolist())
    deeper = expand(torch.tensor([[4, 3]]), torch.tensor([[0, 0]]))
    assert deeper.tokens[0, :, 0].tolist() == [8, 9]


def test_no_match_is_an_empty_tree():
    tree, _ = SHAPE.grow(torch.tensor([3]), *begin(Ngram(), [[1, 2, 3]], junk=3))
    assert tree.valid.tolist() == [[True] + [False] * SHAPE.nodes]


def test_a_node_without_context_asks_the_bigrams():
    scorer = Ngram(make_tables({3: {1: 0.5}}, {(0, 3): {2: 0.5}}, 5))
    root, _ = begin(scorer, [[3], [0, 3]], junk=3)
    assert root.tokens[:, 0, 0].tolist() == [1, 2]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 8)), min_size=1, max_size=8))
def test_likeliest_returns_each_token_once_and_the_first_of_equals(candidates):
    names, scores = (torch.tensor(column)[None, None] for column in zip(*candidates, strict=True))
    got = likeliest(names, scores / 8, 3)
    first = {}
    for token, score in candidates:
        if token >= 0 and score > 0:
            first.setdefault(token, score / 8)
    ordered = sorted(first.items(), key=lambda item: -item[1])[:3]
    assert got.tokens[0, 0, : len(ordered)].tolist() == [token for token, _ in ordered]
    assert got.log_probs[0, 0].exp().tolist() == pytest.approx(
        [p for _, p in ordered] + [0.0] * (3 - len(ordered)), rel=1e-3
    )


@pytest.mark.parametrize("crowd", [1, 7, 1 << 20])
def test_the_hash_is_a_dict(crowd, monkeypatch):
    """Also when all pairs want one of few homes."""
    for module in (ngram_tables, layout):
        monkeypatch.setattr(module, "home", lambda *pair: home(*pair) % crowd)
    random.seed(crowd)
    vocabulary, count = 1000, {1: 8, 7: 30, 1 << 20: 5000}[crowd]
    pairs = sorted({(random.randrange(vocabulary), random.randrange(vocabulary)) for _ in range(count)})
    trigrams = {pair: {index % vocabulary: 1.0} for index, pair in enumerate(pairs)}
    tables = make_tables({token: {token: 1.0} for token in range(vocabulary)}, trigrams, vocabulary, width=1)
    others = [(random.randrange(vocabulary), random.randrange(vocabulary)) for _ in range(5000)] + [(-2, 5), (-1, 0)]
    asked = torch.tensor([*pairs, *others])
    got, probability = layout.look_up(asked[None, :, 0], asked[None, :, 1], *tables.tensors)
    expected = [next(iter(trigrams.get(pair, {pair[1]: 1.0}))) for pair in [*pairs, *others]]
    assert got[0, :, 0].tolist() == expected and bool((probability == 1).all())


def test_a_pair_given_twice_is_refused():
    rows = torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="expected each pair of tokens once"):
        NgramTables(rows, torch.tensor([[1, 1], [1, 1]]), rows)


@pytest.mark.parametrize("options", [{"matches": 0}, {"concentrations": {}}, {"concentrations": {2: 0.0}}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match="ngram: expected"):
        Ngram(**options)


def test_greedy_output_with_tables_is_transformers(tmp_path, monkeypatch):
    """Tables of noise, and tables that know the answer: the same output, in fewer steps."""
    folder, prompt = save_model(tmp_path / "model"), [5, 9, 17]
    answer = greedy(tiny_model("Llama"), prompt, 24)
    text = [*prompt, *answer]
    known = {text[i - 1]: {text[i]: 0.9} for i in range(1, len(text))}
    pairs = {(text[i - 2], text[i - 1]): {text[i]: 0.9} for i in range(2, len(text))}
    noise = {token: {(token * 7 + shift) % 320: 0.3 for shift in range(3)} for token in range(320)}
    steps = []
    for tables in (make_tables(noise, {}, 320), make_tables(known, pairs, 320)):
        shape = DynamicTree(3, 2, 5)
        monkeypatch.setattr(choose, "_scorer", lambda *_, tables=tables, shape=shape: (Ngram(tables), shape))
        engine = specstep.eager(str(folder), dtype="float32", max_seq_len=64)
        result = engine.generate(prompt, 24, ignore_eos=True)
        assert result.token_ids == answer
        steps.append(result.stats["steps"])
    assert steps[1] < 12 < steps[0]
