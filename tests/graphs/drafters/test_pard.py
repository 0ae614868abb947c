"""PARD: all depths from one pass with mask tokens, against a plain re-computation; exact output whatever it drafts."""

import itertools
import json

import pytest
import specstep
import torch
from models import greedy, save_model, tiny_model
from plain_eagle3 import chains, paths_of
from specstep.graphs.drafters.pard import Pard
from specstep.graphs.target import CausalLM
from transformers import AutoModelForCausalLM

MASK = 311
PROMPTS = [[5], [7, 8], [40, 41, 42] * 9, list(range(200, 253))]
TREES = [
    {"tree": "chain", "nodes": 4},
    {"tree": "static", "nodes": 9, "depth": 3, "top_k": 3},
    {"tree": "dynamic", "nodes": 11, "depth": 4, "top_k": 3},
    {"tree": "chain", "nodes": 1},
]
OPTIONS = {"dtype": "float32", "max_seq_len": 96}


def configure(folder, **fields):
    """Write fields into a model's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "target")
    small = save_model(folder / "small", seed=1, num_hidden_layers=2, hidden_size=32)
    configure(small, pard_token=MASK, spd_type="pard")
    return folder


@torch.no_grad()
def plain_depths(small, tokens, depth, shift=0):
    """Log-probabilities [D, V] of what follows these tokens, as PARD's own inference has it."""
    logits = small(torch.tensor([[*tokens, *[MASK] * (depth - 1 + shift)]])).logits[0]
    return logits[-depth:].log_softmax(-1)


@pytest.mark.parametrize("nodes", [[None] * 20, [0, 0, 0, 4, 1, 2, 0, 3, 1, 1, 4, 0, 2]], ids=["all", "any"])
def test_drafts_are_those_of_a_plain_recomputation(nodes, folder):
    engine = specstep.eager(str(folder / "target"), drafter=str(folder / "small"), tree="chain", nodes=4, **OPTIONS)
    small = AutoModelForCausalLM.from_pretrained(folder / "small", dtype=torch.float32).eval()
    found = list(chains(engine, nodes))
    assert all(got == plain_depths(small, tokens, 4).argmax(-1).tolist() for tokens, got in found)
    for shift in (1, -1):  # the control: each depth taken from the slot beside its own
        assert any(got[:3] != plain_depths(small, tokens, 3, shift).argmax(-1).tolist() for tokens, got in found)


def test_a_dynamic_tree_has_the_best_of_all_paths(folder):
    """Every combination of the depths' candidates is a path; the tree is those of the highest sums."""
    tree = {"tree": "dynamic", "nodes": 5, "depth": 3, "top_k": 5}
    engine = specstep.eager(str(folder / "target"), drafter=str(folder / "small"), **OPTIONS, **tree)
    small = AutoModelForCausalLM.from_pretrained(folder / "small", dtype=torch.float32).eval()
    tokens = [40, 41, 42, 50, 9, 8]
    engine.session.admit(tokens, 60, [])
    tokens = tokens + engine.session.step()[0].tokens
    for _ in range(8):
        depths = plain_depths(small, tokens, 3)
        each = [depth.topk(5).indices.tolist() for depth in depths]
        paths = [path for size in (1, 2, 3) for path in itertools.product(*each[:size])]
        paths.sort(key=lambda path: -sum(float(depths[at, token]) for at, token in enumerate(path)))
        assert {*paths[:5]} == paths_of(engine.session.tree(0))
        tokens = tokens + engine.session.step()[0].tokens


@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "mixed"])
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree['tree']}-{tree['nodes']}")
def test_output_equals_transformers(tree, mixed, folder):
    model = tiny_model("Llama")
    expected = [greedy(model, prompt, 30, [1]) for prompt in PROMPTS]
    drafter = ("ngram," if mixed else "") + str(folder / "small")
    engine = specstep.eager(str(folder / "target"), drafter=drafter, max_batch=3, **OPTIONS, **tree)
    assert [result.token_ids for result in engine.generate(PROMPTS, 30)] == expected


def test_sampled_texts_are_those_of_plain_decoding(folder):
    asked = [specstep.SamplingParams(temperature=0.9, seed=seed) for seed in range(3)]
    texts = []
    for drafter in ("none", str(folder / "small")):
        engine = specstep.eager(str(folder / "target"), drafter=drafter, max_batch=2, **OPTIONS)
        texts.append([engine.generate(prompt, 30, sampling=s).token_ids for prompt in PROMPTS for s in asked])
    assert texts[0] == texts[1]


@pytest.fixture(scope="module")
def clock(tmp_path_factory):
    """A model whose next token depends on the position alone, so that masks are as good as tokens."""
    model = tiny_model("GPT2", tie_word_embeddings=False)
    with torch.no_grad():
        model.transformer.wte.weight.mul_(1e-5)
    folder = tmp_path_factory.mktemp("clock")
    for name in ("target", "pard"):
        model.save_pretrained(folder / name)
    configure(folder / "pard", pard_token=MASK)
    return folder


def test_masks_in_their_places_are_all_accepted(clock, monkeypatch):
    """And one pass a step drafts them."""
    engine = specstep.eager(str(clock / "target"), drafter=str(clock / "pard"), nodes=5, **OPTIONS)
    result = engine.generate([40, 41, 42], 31, ignore_eos=True)
    assert len({*result.token_ids}) > 10 and result.stats["accepted"] == {"0": 1, "5": 5}
    right = Pard._all_depths
    monkeypatch.setattr(Pard, "_all_depths", lambda *given: (right(*given)[0].roll(1, 1), right(*given)[1]))
    off = specstep.eager(str(clock / "target"), drafter=str(clock / "pard"), nodes=5, **OPTIONS)
    again = off.generate([40, 41, 42], 31, ignore_eos=True)
    assert again.token_ids == result.token_ids
    assert again.stats["steps"] > 3 * result.stats["steps"], "the control: one slot off"


def test_one_pass_drafts_all_depths(folder, monkeypatch):
    """Mixed with n-grams, too, whose trees are deeper than two levels."""
    engine = specstep.eager(str(folder / "target"), drafter=f"ngram,{folder / 'small'}", nodes=7, depth=7, **OPTIONS)
    passes = []
    model = CausalLM.forward
    monkeypatch.setattr(CausalLM, "forward", lambda self, *given: passes.append(self.layers) or model(self, *given))
    engine.session.admit(PROMPTS[2], 60, [])
    passes.clear()
    for count in range(1, 5):
        engine.session.step()
        assert passes.count(2) == count, "of the drafter's two layers"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pard_token": -1}, "pard_token: expected the mask token's id, 0 to 319, got -1; it is what"),
        ({"pard_token": 320}, "pard_token: .* got 320"),
        ({"pard_token": [311]}, r"pard_token: .* got \[311\]"),
        ({"pard_token": None}, "pard_token: .* got None"),
        (
            {"spd_type": "hydra"},
            "spd_type: expected pard, pard2 or none, got 'hydra'; take a PARD model",
        ),
    ],
)
def test_other_kinds_are_refused(fields, message, folder, tmp_path):
    small = save_model(tmp_path / "small", seed=1)
    configure(small, pard_token=MASK, spd_type="pard")
    configure(small, **fields)
    with pytest.raises(specstep.BuildError, match=message):
        specstep.eager(str(folder / "target"), drafter=str(small), **OPTIONS)


@pytest.mark.slow
def test_an_engine_with_it(folder, tmp_path):
    drafter = f"ngram,{folder / 'small'}"
    specstep.build(str(folder / "target"), tmp_path / "engine", drafter=drafter, max_batch=2, **OPTIONS)
    expected = [greedy(tiny_model("Llama"), prompt, 30, [1]) for prompt in PROMPTS]
    with specstep.load(tmp_path / "engine") as engine:
        assert [result.token_ids for result in engine.generate(PROMPTS, 30)] == expected
