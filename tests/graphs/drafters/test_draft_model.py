"""A draft model with another tokenizer: its drafts against a plain re-computation, a perfect one, and exact output."""

import pytest
import specstep
import torch
from models import greedy, pieces_tokenizer, save_model, tiny_model
from plain_eagle3 import chains
from specstep.cli import main
from specstep.compile.drafters.vocabulary import tokens_between
from specstep.compile.source import load_source
from transformers import AutoModelForCausalLM

PROMPTS = [[5], [7, 8], [40, 41, 42] * 9, list(range(200, 253)), [319, 300, 5, 259]]
TREES = [
    {"tree": "chain", "nodes": 4},
    {"tree": "static", "nodes": 9, "depth": 3, "top_k": 3},
    {"tree": "dynamic", "nodes": 11, "depth": 4, "top_k": 3},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target of bytes, and a drafter of pieces that lacks some of them."""
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "target", tokenizer=True)
    save_model(folder / "small", seed=1, num_hidden_layers=2, hidden_size=32)
    pieces_tokenizer(without="JKvxz").save_pretrained(folder / "small")
    return folder


@torch.no_grad()
def plain_chain(small, common, tokens, length):
    """The chain after these tokens, recomputed from nothing at every level."""
    drafted = []
    for _ in range(length):
        logits = small(torch.tensor([[common.given[token] for token in [*tokens, *drafted]]])).logits[0, -1]
        drafted.append(int(common.ids[logits[common.drafted].argmax()]))
    return drafted


@torch.no_grad()
@pytest.mark.parametrize("nodes", [[None] * 20, [0, 0, 0, 4, 1, 2, 0, 3, 1, 1, 4, 0, 2]], ids=["all", "any"])
def test_drafts_are_those_of_a_plain_recomputation(nodes, folder):
    options = {"dtype": "float32", "max_seq_len": 96, "tree": "chain", "nodes": 4}
    engine = specstep.eager(str(folder / "target"), drafter=str(folder / "small"), **options)
    small = AutoModelForCausalLM.from_pretrained(folder / "small", dtype=torch.float32).eval()
    common = tokens_between(*(load_source(str(folder / name), "float32", "cpu") for name in ("target", "small")))
    found = list(chains(engine, nodes))
    assert all(got == plain_chain(small, common, tokens, 4) for tokens, got in found)
    common.given = common.given.roll(1)  # the control: every token read as the one before it
    assert any(got != plain_chain(small, common, tokens, 4) for tokens, got in found)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree["tree"])
@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "mixed"])
def test_output_equals_transformers(tree, mixed, folder):
    model = tiny_model("Llama")
    expected = [greedy(model, prompt, 30, [1]) for prompt in PROMPTS]
    drafter = ("ngram," if mixed else "") + str(folder / "small")
    engine = specstep.eager(
        str(folder / "target"), drafter=drafter, dtype="float32", max_batch=4, max_seq_len=96, **tree
    )
    assert [result.token_ids for result in engine.generate(PROMPTS, 30)] == expected


def test_prefixes_and_samples_are_those_of_plain_decoding(folder):
    """Prompts that begin alike share the draft model's caches as well; noise is that of the target's tokens."""
    target, asked = str(folder / "target"), specstep.SamplingParams(temperature=0.9, top_p=0.95, seed=3)
    prompts = [PROMPTS[3] + [9, end] for end in (5, 6, 7)]
    texts = []
    for drafter in ("none", str(folder / "small")):
        engine = specstep.eager(
            target, drafter=drafter, dtype="float32", max_batch=2, max_seq_len=128, prefix_cache_bytes=2**22
        )
        texts.append([engine.generate(p, 30, sampling=s).token_ids for p in prompts for s in (None, asked)])
    assert texts[0] == texts[1]


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """A target all of whose tokens a drafter has, and the drafter: the same model with its tokens in another order."""
    folder = tmp_path_factory.mktemp("twin")
    save_model(folder / "target", tokenizer=True, vocab_size=258)
    ours, theirs = load_source(str(folder / "target"), "float32", "cpu"), pieces_tokenizer(seed=5)
    save_model(folder / "twin", vocab_size=len(theirs))
    theirs.save_pretrained(folder / "twin")
    twin = load_source(str(folder / "twin"), "float32", "cpu")
    common = tokens_between(ours, twin)
    twin.model.load_state_dict(
        {name: value for name, value in ours.model.state_dict().items() if "embed" not in name and "head" not in name},
        strict=False,
    )
    for part in ("get_input_embeddings", "get_output_embeddings"):
        table = getattr(twin.model, part)().weight.data
        table[common.drafted] = getattr(ours.model, part)().weight.data[common.ids]
    twin.model.save_pretrained(folder / "twin")
    return folder


def test_the_target_in_another_order_accepts_all(twin):
    engine = specstep.eager(str(twin / "target"), drafter=str(twin / "twin"), dtype="float32", max_seq_len=96, nodes=3)
    result = engine.generate([40, 41, 42, 50, 9, 8], 29, ignore_eos=True)
    assert result.stats["accepted"] == {"0": 1, "3": 7}, "all but in the first step, which has no tree"


def test_a_sampled_row_accepts_what_the_same_tokenizer_would(twin):
    """The noise is that of the target's tokens, whatever the drafter calls them."""
    found = []
    for drafter in ("target", "twin"):
        engine = specstep.eager(
            str(twin / "target"), drafter=str(twin / drafter), dtype="float32", max_seq_len=96, nodes=3
        )
        asked = [specstep.SamplingParams(temperature=0.8, seed=seed) for seed in range(4)]
        found.append([engine.generate([40, 41, 42], 29, sampling=s, ignore_eos=True).stats["accepted"] for s in asked])
    assert found[0] == found[1]


@pytest.mark.slow
def test_inspect_says_what_is_in_common(twin, tmp_path, capsys):
    target, lines, options = str(twin / "target"), [], {"dtype": "float32", "max_seq_len": 96}
    specstep.build(
        target,
        tmp_path / "engine",
        drafter=str(twin / "twin"),
        nodes=1,
        backend="onnx",
        progress=lines.append,
        **options,
    )
    said = "258 of 286 tokens in common with the target, 100% of those of a sample text"
    assert f"vocabulary: {said}" in lines
    main(["inspect", str(tmp_path / "engine")])
    assert f"vocabulary  {said}\n" in capsys.readouterr().out
    eager = specstep.eager(target, drafter="none", **options)
    with specstep.load(tmp_path / "engine") as engine:
        assert engine.generate([40, 41], 20).token_ids == eager.generate([40, 41], 20).token_ids
