"""EAGLE-3: the head against a plain re-computation, its files, and exact output whatever it drafts."""

import json

import pytest
import specstep
import torch
from models import greedy, save_eagle3, save_model, tiny_model
from plain_eagle3 import chains, plain_chain
from safetensors.torch import load_file, save_file
from specstep.compile.config import EngineConfig
from specstep.compile.drafters.eagle3_file import load_eagle3
from specstep.compile.source import load_source

PROMPTS = [[5], [7, 8], [40, 41, 42] * 9, list(range(30, 83))]
TREES = [
    {"tree": "chain", "nodes": 4},
    {"tree": "static", "nodes": 9, "depth": 3, "top_k": 3},
    {"tree": "dynamic", "nodes": 11, "depth": 4, "top_k": 3},
    {"tree": "chain", "nodes": 1},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree['tree']}-{tree['nodes']}")
@pytest.mark.parametrize("variant", [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_residual": True}])
def test_output_equals_transformers(tree, variant, target, tmp_path):
    head = save_eagle3(tmp_path / "head", **variant)
    model = tiny_model("Llama")
    expected = [greedy(model, prompt, 30, [1]) for prompt in PROMPTS]
    for batch in (1, 4):
        engine = specstep.eager(
            str(target), drafter=str(head), dtype="float32", max_batch=batch, max_seq_len=96, **tree
        )
        assert [result.token_ids for result in engine.generate(PROMPTS, 30)] == expected


@torch.no_grad()
@pytest.mark.parametrize("nodes", [[None] * 20, [0, 0, 0, 4, 1, 2, 0, 3, 1, 1, 4, 0, 2]], ids=["all", "any"])
def test_drafts_are_those_of_a_plain_recomputation(nodes, target, tmp_path):
    """Catch-up, feedback, positions and cache of the drafted levels, over many steps of any number of nodes."""
    head = save_eagle3(tmp_path / "head")
    engine = specstep.eager(str(target), drafter=str(head), dtype="float32", max_seq_len=96, tree="chain", nodes=4)
    weights, model = load_file(head / "model.safetensors"), tiny_model("Llama")
    for tokens, got in chains(engine, nodes):
        assert got == plain_chain(weights, model, tokens, 4)


@torch.no_grad()
@pytest.mark.parametrize("normed", [False, True])
def test_a_head_is_fed_with_what_its_config_says(normed, target, tmp_path):
    """The recomputation feeds it with the hidden state ahead of the norm, whose weights are other than 1."""
    head = save_eagle3(tmp_path / "head", norm_output=True, norm_feedback=normed)
    engine = specstep.eager(str(target), drafter=str(head), dtype="float32", max_seq_len=96, tree="chain", nodes=4)
    weights, model = load_file(head / "model.safetensors"), tiny_model("Llama")
    found = chains(engine, [None] * 12)
    assert all(got == plain_chain(weights, model, tokens, 4) for tokens, got in found) == (not normed)
    assert all(got[:1] == plain_chain(weights, model, tokens, 4)[:1] for tokens, got in found)


@torch.no_grad()
@pytest.mark.parametrize("used", [{}, {"use_sliding_window": True}, {"use_sliding_window": False}])
def test_a_head_attends_to_the_window_that_its_config_says(used, target, tmp_path):
    """speculators trains heads with one of 2,048 tokens by default, since version 0.7."""
    head = save_eagle3(tmp_path / "head", layer_types=["sliding_attention"], sliding_window=5, **used)
    engine = specstep.eager(str(target), drafter=str(head), dtype="float32", max_seq_len=96, tree="chain", nodes=4)
    weights, model = load_file(head / "model.safetensors"), tiny_model("Llama")
    found = chains(engine, [None] * 8)
    window = 5 if used.get("use_sliding_window", True) else 0
    for wrong, same in ((window, True), (5 - window, False), (4, False), (6, False)):
        assert all(got == plain_chain(weights, model, tokens, 4, window=wrong) for tokens, got in found) == same


AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t, c: t.pop("fc.weight"), "missing fc.weight"),
        (lambda t, c: t.update(extra=torch.zeros(1)), "unexpected extra"),
        (lambda t, c: t.update({"norm.weight": torch.zeros(7)}), r"norm.weight: expected \[48\], got \[7\]"),
        (lambda t, c: t["d2t"].add_(10**6), "d2t: expected target ids below 320"),
        (lambda t, c: c.pop("intermediate_size"), "expected the fields intermediate_size"),
        (lambda t, c: c.update(num_hidden_layers=2), "num_hidden_layers: expected 1, got 2"),
        (lambda t, c: c.update(layer_types=["chunked"]), "layer_types: expected full_attention or sliding_attention"),
        (lambda t, c: c.update(layer_types=["sliding_attention"]), "sliding_window: expected at least 1 .*, got None"),
        (lambda t, c: c.update(target_hidden_size=64), "hidden size 48, got one for 64"),
        (lambda t, c: c.update({AUX: [1, 2, 9]}), "hidden states 0 to 3 of the target, got 1, 2, 9"),
        (lambda t, c: c.update({AUX: "1, 2"}), "expected a list of layers, got '1, 2'"),
        (lambda t, c: c.update({AUX: [0, 1]}), r"fc.weight: expected \[48, 96\], got \[48, 144\]"),
        (lambda t, c: c.update(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state: expected true"),
        (lambda t, c: c.update(speculators_model_type="independent"), "model_type: expected eagle3, got independent"),
        (lambda t, c: c.update(fc_norm=True), "missing fc_norm.0.weight, missing fc_norm.1"),
    ],
)
def test_heads_that_do_not_fit_are_refused(damage, message, target, tmp_path):
    head = save_eagle3(tmp_path / "head", **{AUX: [0, 1, 2]})
    tensors, config = load_file(head / "model.safetensors"), json.loads((head / "config.json").read_text())
    damage(tensors, config)
    save_file(tensors, head / "model.safetensors")
    (head / "config.json").write_text(json.dumps(config))
    with pytest.raises(specstep.BuildError, match=message.replace(", missing", "; missing")):
        specstep.eager(str(target), drafter=str(head), dtype="float32", max_seq_len=96)


def test_low_precision_keeps_exact_rotary_frequencies(target, tmp_path):
    """In bfloat16, angles at position 200 would be off by radians."""
    head = save_eagle3(tmp_path / "head")
    source = load_source(str(target), "bfloat16", "cpu")
    scorer = load_eagle3(str(head), source, EngineConfig(drafter=str(head)))
    assert scorer.head.fc.weight.dtype == torch.bfloat16
    torch.testing.assert_close(scorer.head.rotary.inv_freq, 10000.0 ** -(torch.arange(0, 12, 2) / 12))


def test_other_published_names_and_pickles_without_code(target, tmp_path):
    """`layers.0.` in place of `midlayer.`, and pytorch_model.bin, read without running what it may contain."""
    head = save_eagle3(tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    (head / "model.safetensors").unlink()
    torch.save(
        {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}, head / "pytorch_model.bin"
    )
    first = specstep.eager(str(target), drafter=str(head), dtype="float32", max_seq_len=96)
    assert first.generate(PROMPTS[2], 10).token_ids == greedy(tiny_model("Llama"), PROMPTS[2], 10)
    torch.save({"fc.weight": print}, head / "pytorch_model.bin")
    with pytest.raises(specstep.BuildError, match="expected readable tensors"):
        specstep.eager(str(target), drafter=str(head), dtype="float32", max_seq_len=96)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tree": "dynamic", "depth": 2, "top_k": 2, "nodes": 7},
            "nodes: expected between depth .2. and all candidates .* .6., got 7",
        ),
        ({"tree": "static", "depth": 2, "top_k": 2, "nodes": 7}, "nodes: expected 1 to 6"),
        ({"tree": "chain", "nodes": 4, "tree_choices": "x.json"}, "tree_choices: expected with tree static"),
        ({"tree_choices": "nowhere.json"}, "tree_choices: expected a JSON file"),
    ],
)
def test_trees_that_cannot_fit_are_refused(options, message, target, tmp_path):
    head = save_eagle3(tmp_path / "head")
    with pytest.raises(specstep.BuildError, match=message):
        specstep.eager(str(target), drafter=str(head), dtype="float32", max_seq_len=96, **options)


def test_tree_choices_file(target, tmp_path):
    head, file = save_eagle3(tmp_path / "head"), tmp_path / "choices.json"
    file.write_text(json.dumps([[0, 0], [1], [0], [0, 1], [1, 0], [0, 0, 0]]))
    engine = specstep.eager(str(target), drafter=str(head), dtype="float32", max_seq_len=96, tree_choices=str(file))
    assert (engine.spec.config["nodes"], engine.spec.config["depth"]) == (6, 3)
    assert engine.generate(PROMPTS[3], 20).token_ids == greedy(tiny_model("Llama"), PROMPTS[3], 20, [1])
    file.write_text("[[0], [1, 1]]")
    with pytest.raises(specstep.BuildError, match=r"expected the prefix \[1\] of \[1, 1\]"):
        specstep.eager(str(target), drafter=str(head), dtype="float32", max_seq_len=96, tree_choices=str(file))
