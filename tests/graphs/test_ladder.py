"""Any number of a tree's nodes may be verified: the text, and the trees that follow, do not depend on it."""

import itertools
import random

import pytest
import specstep
import torch
from models import save_eagle3, save_model
from pard2_model import HIDDEN, save_pard2
from specstep.graphs.attention import Pass
from specstep.graphs.drafters.ngram import Ngram
from specstep.graphs.step import with_missed
from specstep.graphs.tree import DraftTree, first_nodes, missed_node, what_follows
from specstep.kernels.ngram.learned import learn_text
from specstep.report import CHEAP, NOTHING, WHOLE

OPTIONS = {"dtype": "float32", "max_batch": 2, "max_seq_len": 192, "prefill_chunk": 16}
PROMPTS = ([40, 41, 42] * 9, [5])
GREEDY = {"learning": 0}  # what an engine learns changes its trees
SAMPLED = {"sampling": [0.5, 40, 0.9, 0, 1.1, 0, 0], "seeds": 77, "learning": 0}


def run(engine, pick, controls, drafts=lambda: WHOLE, stop=(1,)):
    """The rows' texts, each row's trees by its length, and how many drafts were accepted. pick: nodes of a step;
    drafts: what drafts the next trees. Those that not all did are left out."""
    session, texts, trees, accepted = engine.session, {}, {}, 0
    drafted = NOTHING
    for prompt in PROMPTS:
        texts[session.admit(prompt, len(prompt) + 40, list(stop), controls)] = []
    while any(finish == 0 for finish in session.state["finish"].tolist()):
        for row in texts:
            if session.state["finish"][row] == 0 and drafted == WHOLE:
                trees[row, session.lengths[row]] = session.tree(row)
        step = session.begin_step(pick(), drafts())
        drafted = step.draft
        for row, report in session.end_step(step).items():
            texts[row] += report.tokens
            accepted += len(report.path)
    for row in texts:
        session.release(row)
    return texts, trees, accepted


def rungs(most, seed):
    """Another number of nodes at each step."""
    choice = random.Random(seed)
    return lambda: choice.randint(0, most)


@pytest.mark.parametrize(
    ("drafter", "tree"),
    [
        ("ngram", {"nodes": 7}),
        ("ngram", {"tree": "chain", "depth": 4}),
        ("ngram", {"tree": "static", "depth": 3, "top_k": 2, "nodes": 6}),
        ("self", {"tree": "dynamic", "depth": 3, "top_k": 2, "nodes": 6}),
        ("model", {"tree": "static", "depth": 3, "top_k": 2, "nodes": 6}),
        ("eagle3", {"tree": "dynamic", "depth": 3, "top_k": 3, "nodes": 8}),
        ("ngram,eagle3", {"tree": "dynamic", "depth": 3, "top_k": 3, "nodes": 8}),
        ("published", {"tree": "dynamic", "depth": 3, "top_k": 3, "nodes": 8}),
    ],
)
def test_every_rung_says_the_same(drafter, tree, model_folder, drafter_folder, published_heads, tmp_path):
    names = {"model": drafter_folder, "self": model_folder, "published": published_heads}
    if "eagle3" in drafter:
        names["eagle3"] = save_eagle3(tmp_path / "head")
    name = ",".join(str(names.get(part, part)) for part in drafter.split(","))
    engine = specstep.eager(str(model_folder), drafter=name, **tree, **OPTIONS)
    most = engine.spec.nodes
    for controls in (GREEDY, SAMPLED):
        expected, plain, _ = run(engine, lambda: 0, controls)
        for pick in (lambda: most, lambda: 1, rungs(most, 0), rungs(most, 1)):
            texts, trees, accepted = run(engine, pick, controls)
            assert texts == expected
            # Draft caches and features survive steps that verified few drafts, or none.
            assert all(plain[place] == drafted for place, drafted in trees.items())
            assert accepted or drafter != "self"


@pytest.mark.parametrize(
    "drafter",
    [
        "ngram,eagle3",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("published", "eagle3", "model", "ngram,model", "pard2", "self")
        ),
    ],
    ids=lambda name: name.replace(",", "+"),
)
def test_a_drafter_that_pauses_catches_up(drafter, model_folder, drafter_folder, published_heads, tmp_path):
    names = {"model": drafter_folder, "self": model_folder, "published": published_heads}
    if drafter == "pard2":
        small = save_model(tmp_path / "small", seed=1, num_hidden_layers=2, hidden_size=32)
        names["pard2"] = save_pard2(small, torch.randn(32, 2 * HIDDEN))
    if "eagle3" in drafter:
        names["eagle3"] = save_eagle3(tmp_path / "head")
    name = ",".join(str(names.get(part, part)) for part in drafter.split(","))
    engine = specstep.eager(str(model_folder), drafter=name, tree="dynamic", depth=3, top_k=2, nodes=6, **OPTIONS)
    session = engine.session
    for controls in (GREEDY, SAMPLED):
        expected, plain, _ = run(engine, lambda: 0, controls, stop=())
        for pick, every in ((lambda: 0, 8), (rungs(6, 0), 2), (lambda: 1, 4), (rungs(6, 2), 25)):
            turns, replayed, replay = itertools.count(1), [], session.replay
            session.replay = lambda *size, replay=replay, seen=replayed: (seen.append(size), replay(*size))[1]
            drafts = (CHEAP if turn % every else WHOLE for turn in turns)
            texts, trees, _ = run(engine, pick, controls, lambda drafts=drafts: next(drafts), ())
            del session.replay
            assert texts == expected and len(trees) >= len(PROMPTS)
            caught_up = [positions for *_, positions in replayed]
            assert 0 in caught_up and max(caught_up) <= session.spec.catch_up
            if every < 25:  # all that was left out is caught up: the trees are those of a drafter that did not pause
                assert all(plain[place] == drafted for place, drafted in trees.items())


@pytest.mark.parametrize("drafter", ["eagle3", "model"])
def test_a_drafter_that_pauses_computes_with_zeros_and_proposes_nothing(
    drafter, model_folder, drafter_folder, tmp_path, monkeypatch
):
    path = save_eagle3(tmp_path / "head") if drafter == "eagle3" else drafter_folder
    engine = specstep.eager(str(model_folder), drafter=str(path), tree="dynamic", depth=3, top_k=2, nodes=6, **OPTIONS)
    session, seen = engine.session, []
    row = session.admit(PROMPTS[0], 90, [], SAMPLED)
    attention = Pass.attention

    def watched(self, query, key, value, *others):
        out = attention(self, query, key, value, *others)
        if self.wanted is not None:
            seen.append(bool(query.any() or out.any()))
        return out

    monkeypatch.setattr(Pass, "attention", watched)
    for draft in (WHOLE, CHEAP, CHEAP, WHOLE, CHEAP):
        seen.clear()
        session.step(2, draft)
        assert seen and set(seen) == {draft == WHOLE}
        assert any(parent >= 0 for parent in session.tree(row).parents) == (draft == WHOLE)


def test_what_is_not_in_a_paused_drafters_cache_is_not_kept_for_others(model_folder, tmp_path):
    options = {"drafter": str(save_eagle3(tmp_path / "head")), "depth": 3, "top_k": 2, "nodes": 6, **OPTIONS}
    engine = specstep.eager(str(model_folder), **options, prefix_cache_bytes=1 << 20)
    fresh = specstep.eager(str(model_folder), **options)
    session, begin = engine.session, engine.session.begin_step
    prompt = list(range(3, 60))
    session.begin_step = lambda nodes, draft: begin(nodes, CHEAP)
    first = engine.generate([prompt], 45, ignore_eos=True)[0]
    session.begin_step = begin
    longer = [*prompt, *first.token_ids, 7, 8, 9]
    got, expected = (each.generate([longer], 30, ignore_eos=True)[0] for each in (engine, fresh))
    assert got.token_ids == expected.token_ids
    assert got.stats["cached_tokens"] == 31  # one block: the drafter left the answer out
    assert got.stats["accepted"] == expected.stats["accepted"]


@pytest.mark.parametrize("backend", ["engine_folder", "onnx_folder"])
def test_every_rung_of_an_engine_says_the_same(backend, model_folder, request):
    engine = specstep.load(request.getfixturevalue(backend))
    eager = specstep.eager(str(model_folder), drafter="ngram", **OPTIONS)
    most = engine.spec.nodes
    for controls in (GREEDY, SAMPLED):
        expected, plain, _ = run(eager, lambda: 0, controls)
        for nodes in (0, 1, 2, most):
            texts, trees, _ = run(engine, lambda nodes=nodes: nodes, controls)
            assert texts == expected and all(plain[place] == drafted for place, drafted in trees.items())
        changing = [run(each, rungs(most, 3), controls) for each in (engine, eager)]
        assert changing[0] == changing[1] and changing[0][0] == expected


@pytest.mark.parametrize("backend", ["engine_folder", "onnx_folder"])
def test_steps_that_draft_nothing_say_the_same(backend, model_folder, request):
    """An n-gram drafter takes up where it was, as its trees are of the history alone."""
    engine = specstep.load(request.getfixturevalue(backend))
    eager = specstep.eager(str(model_folder), drafter="ngram", **OPTIONS)
    assert NOTHING in engine.session.draft_kinds
    for controls in (GREEDY, SAMPLED):
        expected, plain, _ = run(eager, lambda: 0, controls)
        replayed, replay = [], engine.session.replay
        engine.session.replay = lambda *size, replay=replay, seen=replayed: (seen.append(size), replay(*size))[1]
        for pick, every in ((lambda: 0, 100), (rungs(engine.spec.nodes, 1), 2), (rungs(engine.spec.nodes, 2), 3)):
            turns = itertools.count(1)
            texts, trees, _ = run(
                engine, pick, controls, lambda every=every, turns=turns: NOTHING if next(turns) % every else WHOLE
            )
            assert texts == expected and all(plain[place] == drafted for place, drafted in trees.items())
        del engine.session.replay
        assert {nodes is None for *_, nodes, _ in replayed} == {True, False}
    row = engine.session.admit(PROMPTS[0], 90, [], GREEDY)
    for _ in range(3):
        engine.session.step(0, NOTHING)
    assert engine.session.processed(row) == engine.session.lengths[row] > len(PROMPTS[0]), "no cache has a gap"
    before = engine.session.read_shared()["learned"]
    engine.session.release(row)
    engine.session.admit(PROMPTS[0], 90, [])
    engine.session.step(0, NOTHING)
    assert (engine.session.read_shared()["learned"] != before).any(), "what is written counts, drafted for or not"


def test_reports_the_node_that_it_missed(model_folder):
    """A draft model that is the target itself is right: what is left out would have been accepted."""
    options = {"tree": "chain", "depth": 3} | OPTIONS
    session = specstep.eager(str(model_folder), drafter=str(model_folder), **options).session
    row = session.admit(PROMPTS[0], 80, [])
    assert session.step(3)[row].missed == 0, "nothing was drafted for the first step"
    for nodes in (0, 1, 2, 3):
        report = session.step(nodes)[row]
        assert (len(report.path), report.missed) == (nodes, nodes + 1 if nodes < 3 else 0)
    assert session.tree(row, 1) == ([session.tree(row).tokens[0], session.tree(row).tokens[1]], [-1, 0])


def test_what_the_target_says_after_each_node_is_learned():
    """After rejected nodes, too; not after places without a node, nor of a row that stands still or keeps to itself."""
    parents, valid = (
        torch.tensor([[-1, 0, 0, 1]]).expand(4, -1),
        torch.tensor([[True, True, True, False]]).expand(4, -1),
    )
    rows = 10 * torch.arange(4)[:, None]  # each row's tokens are its own
    tree = DraftTree(rows + torch.tensor([9, 4, 5, 6]), parents, valid)
    state = {"history": torch.tensor([[8, 9, 0, 0]] * 3 + [[9, 0, 0, 0]]), "lengths": torch.tensor([1, 1, 1, 0])}
    verified = what_follows(state, tree, torch.tensor([[4, 7, 3, 2]]).expand(4, -1))
    assert verified[0].tolist() == [[8, 9, 4], [9, 4, 7], [9, 5, 3], [4, 6, -1]]
    assert verified[3, 0].tolist() == [-1, 39, 4], "nothing is ahead of a prompt of one token"
    scorer = Ngram(learned_rows=4096)
    told = {"verified": verified, "moved": torch.tensor([1, 0, 1, 1]), "learning": torch.tensor([1, 1, 0, 0])}
    told["learned"] = torch.zeros(scorer.shared()["learned"].shape, dtype=torch.int64)
    scorer.commit(told, torch.zeros(4, 2, dtype=torch.int64), None)
    expected = torch.zeros_like(told["learned"])
    learn_text(expected, torch.tensor([[8, 9, 4], [9, 4, 7], [9, 5, 3]]), torch.full((3,), 2), torch.ones(3).long(), 1)
    assert expected.any() and torch.equal(told["learned"], expected)


def test_missed_node_of_a_tree():
    tokens = torch.tensor([[9, 4, 5, 6, 4], [9, 4, 5, 6, 4]])
    parents = torch.tensor([[-1, 0, 0, 1, 1], [-1, 0, 0, 1, 1]])
    valid = torch.tensor([[True] * 5, [True, True, True, True, False]])
    tree = DraftTree(tokens, parents, valid)
    assert first_nodes(tree, torch.arange(2)).tokens.tolist() == [[9, 4], [9, 4]]
    assert missed_node(tree, torch.tensor([[1], [1]]), torch.tensor([[4], [4]])).tolist() == [[4], [0]]
    assert missed_node(tree, torch.tensor([[0], [0]]), torch.tensor([[5], [7]])).tolist() == [[2], [0]]
    path, accepted = torch.tensor([[0, 1, 2], [0, 1, 3]]), torch.tensor([1, 2])
    assert with_missed(path, accepted, torch.tensor([[4], [3]])).tolist() == [[0, 1, 4], [0, 1, 3]]
