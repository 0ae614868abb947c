"""Block drafters, DFlash and its kin: against the computation that their papers describe; exact output."""

import pytest
import specstep
import torch
from block_drafters import (
    PUBLISHED,
    block_tensors,
    idle_tensors,
    names,
    plain_block,
    plain_log_probs,
    plain_slots,
    save_block,
)  # fmt: skip
from cycle import SIZE, TOKENS, accepted, save_cycle, to_axis
from models import greedy, save_model, tiny_model
from plain_eagle3 import chains, paths_of

pytestmark = pytest.mark.usefixtures("as_published")

PROMPTS = [[5], [7, 8], [40, 41, 42] * 9, list(range(200, 253))]
TREES = [
    {"tree": "chain", "nodes": 4},
    {"tree": "static", "nodes": 9, "depth": 3, "top_k": 3},
    {"tree": "dynamic", "nodes": 11, "depth": 4, "top_k": 3},
]
OPTIONS = {"dtype": "float32", "max_seq_len": 96}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "target")
    for name, (config, tables, _) in PUBLISHED.items():
        save_block(folder / name, config, block_tensors(config, tables))
    return folder


def wrong(meaning):
    """Conventions beside the right one, by what is wrong."""
    yield "a shift", meaning.but(shift=1 - meaning.shift, unused=0)
    yield "hidden states", meaning.but(states=[state - 1 if state else 1 for state in meaning.states])
    yield "a mask", meaning.but(layers=[(not causal, window) for causal, window in meaning.layers])
    if any(window for _, window in meaning.layers):
        yield "a window", meaning.but(layers=[(causal, window and window + 1) for causal, window in meaning.layers])
    if meaning.correction:
        yield "a correction", meaning.but(correction=None)
    if meaning.correction == "selector":
        yield "convolutions", meaning.but(convolved=False)
    if meaning.scale != 1.0:
        yield "a scale", meaning.but(scale=1.0)
    if meaning.softcap:
        yield "a bound", meaning.but(softcap=0.0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_drafts_are_those_of_the_papers(name, folder):
    """Whatever part of a tree was verified before. Each convention that is off shows."""
    config, tables, meaning = PUBLISHED[name]
    w, model = block_tensors(config, tables), tiny_model("Llama")
    engine = specstep.eager(str(folder / "target"), drafter=str(folder / name), tree="chain", nodes=4, **OPTIONS)
    found = chains(engine, [None] * 10 + [0, 0, 0, 4, 1, 2, 0, 3, 1, 1, 4, 0, 2])
    assert [got for _, got in found] == [plain_block(w, model, tokens, 4, meaning) for tokens, _ in found]
    for what, other in wrong(meaning):
        assert any(got != plain_block(w, model, tokens, 4, other) for tokens, got in found), f"the control: {what}"


@pytest.mark.parametrize("name", ["JetSpec", "speculators-dspark", "speculators-rnn", "Domino-shifted", "DFlash2"])
def test_a_dynamic_tree_has_the_best_of_all_paths(name, folder):
    """By the sums of log-probabilities, each corrected by the token ahead on its path."""
    config, tables, meaning = PUBLISHED[name]
    w, model = block_tensors(config, tables), tiny_model("Llama")
    tree = {"tree": "dynamic", "nodes": 5, "depth": 3, "top_k": 5}
    engine = specstep.eager(str(folder / "target"), drafter=str(folder / name), **OPTIONS, **tree)
    tokens = [40, 41, 42, 50, 9, 8]
    engine.session.admit(tokens, 60, [])
    tokens = tokens + engine.session.step()[0].tokens
    for _ in range(6):
        slots, scores = plain_slots(w, model, tokens, 3, meaning), {(tokens[-1],): 0.0}
        for level in range(3):
            for path in [path for path in scores if len(path) == level + 1]:
                best = plain_log_probs(w, model, slots, list(path), meaning).topk(5)
                scores |= {
                    (*path, names(w)[token]): scores[path] + value
                    for value, token in zip(*(part.tolist() for part in best), strict=True)
                }
        best = sorted(scores, key=lambda path: -scores[path])[1:6]
        assert {path[1:] for path in best} == paths_of(engine.session.tree(0))
        tokens = tokens + engine.session.step()[0].tokens


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", ["z-lab-sliding", "speculators-rnn"])
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree["tree"])
def test_output_equals_transformers(tree, name, rows, folder):
    """Alone and mixed with n-grams, whose tree may be deeper than a block."""
    model = tiny_model("Llama")
    expected = [greedy(model, prompt, 30, [1]) for prompt in PROMPTS]
    deep = {"tree": "dynamic", "nodes": 16, "depth": 8}
    for drafter, shape in ((str(folder / name), tree), (f"ngram,{folder / name}", tree | deep)):
        engine = specstep.eager(str(folder / "target"), drafter=drafter, max_batch=rows, **OPTIONS, **shape)
        assert [result.token_ids for result in engine.generate(PROMPTS, 30)] == expected


@pytest.mark.parametrize("name", ["z-lab-sliding", "speculators-rnn"])
def test_sampled_texts_are_those_of_plain_decoding(name, folder):
    asked = [specstep.SamplingParams(temperature=0.9, seed=seed) for seed in range(2)]
    texts = []
    for drafter in ("none", str(folder / name)):
        engine = specstep.eager(str(folder / "target"), drafter=drafter, max_batch=2, **OPTIONS)
        texts.append([engine.generate(prompt, 25, sampling=s).token_ids for prompt in PROMPTS for s in asked])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("off", [0, 1])
def test_a_correction_that_knows_the_answer_is_always_right(off, tmp_path):
    """One that takes the token ahead for another is never."""
    config = PUBLISHED["DeepSpec"][0] | {"markov_rank": SIZE, "mask_token_id": 0, "vocab_size": TOKENS}
    bigrams = {"markov_head.markov_w1.weight": torch.eye(TOKENS, SIZE)}
    bigrams["markov_head.markov_w2.weight"] = to_axis(1 + off)[:TOKENS].clone() * 100
    folder = save_cycle(tmp_path / "cycle")
    head = save_block(tmp_path / "head", config, idle_tensors(config, **bigrams))
    engine = specstep.eager(str(folder), drafter=str(head), tree="chain", nodes=4, **OPTIONS)
    assert accepted(engine) == [{4: 5}, {0: 24}][off]


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_features_of_the_last_position_say_what_follows_the_root(off, tmp_path):
    """A window that reaches one place behind the root shows where each feature lies."""
    layer = {"head_dim": 12, "num_key_value_heads": 4, "num_hidden_layers": 1, "block_size": 2, "sliding_window": 3}
    own = {"mask_token_id": 0, "target_layer_ids": [2]}
    config = PUBLISHED["z-lab"][0] | layer | {"layer_types": ["sliding_attention"], "dflash_config": own}
    config["sample_from_anchor"] = False  # else the build would find the reading in which the wrong one is right
    part = "layers.0.self_attn."
    w = idle_tensors(config)
    w = {name: tensor for name, tensor in w.items() if not name.startswith("layers.1.")}
    w |= {f"{part}{name}_proj.weight": torch.zeros(SIZE, SIZE) for name in "qk"}
    w |= {f"{part}{name}_norm.weight": torch.ones(12) for name in "qk"}
    w |= {"fc.weight": torch.eye(SIZE), "hidden_norm.weight": torch.full((SIZE,), 100.0)}
    w |= {f"{part}v_proj.weight": torch.eye(SIZE), f"{part}o_proj.weight": to_axis(1 + off)}
    head = save_block(tmp_path / "head", config, w)
    engine = specstep.eager(str(save_cycle(tmp_path / "cycle")), drafter=str(head), tree="chain", nodes=1, **OPTIONS)
    assert accepted(engine, count=25) == ({0: 24} if off else {1: 12})


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_an_engine_with_it(name, folder, tmp_path):
    drafter = str(folder / name)
    specstep.build(str(folder / "target"), tmp_path / "engine", drafter=drafter, max_batch=2, **OPTIONS)
    expected = [greedy(tiny_model("Llama"), prompt, 30, [1]) for prompt in PROMPTS]
    with specstep.load(tmp_path / "engine") as engine:
        assert [result.token_ids for result in engine.generate(PROMPTS, 30)] == expected
