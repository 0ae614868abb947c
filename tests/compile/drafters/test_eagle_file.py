"""Heads of EAGLE and HASS as they are published: each layout gives the same drafts, what does not fit is refused."""

import json

import pytest
import specstep
import torch
from eagle_heads import CONFIG, LAYOUTS, eagle_chain, eagle_tensors, save_authors
from models import save_model, tiny_model
from plain_eagle3 import chains
from specstep.compile.drafters.eagle_file import is_eagle

OPTIONS = {"dtype": "float32", "max_seq_len": 96, "tree": "chain", "nodes": 3}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("target"))


@torch.no_grad()
@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_drafts(layout, bias, qkv_bias, target, tmp_path):
    model = tiny_model("Llama")
    tensors = eagle_tensors(model.get_input_embeddings().weight, bias=bias, qkv_bias=qkv_bias)
    config = {"qkv_bias": True} if qkv_bias else {}
    if layout == "speculators":
        config = {"transformer_layer_config": CONFIG | config}
    elif not bias:
        config["bias"] = False  # absent, it is true
    head = LAYOUTS[layout](tmp_path / "head", tensors, **config)
    found = chains(specstep.eager(str(target), drafter=str(head), **OPTIONS), [None] * 4)
    assert [got for _, got in found] == [eagle_chain(tensors, model, tokens, 3) for tokens, _ in found]


@torch.no_grad()
def test_embeddings_and_a_head_of_its_own(target, tmp_path):
    """The target's where there are none; else those that the file brings."""
    model = tiny_model("Llama")
    tensors = eagle_tensors(model.get_input_embeddings().weight)
    bare = {name: tensor for name, tensor in tensors.items() if name != "embed_tokens.weight"}
    own = tensors | {"lm_head.weight": model.get_output_embeddings().weight.detach().roll(1, 0)}
    drafted = []
    for name, given in (("whole", tensors), ("bare", bare), ("own", own)):
        engine = specstep.eager(str(target), drafter=str(save_authors(tmp_path / name, given)), **OPTIONS)
        drafted.append(chains(engine, [None] * 4))
    assert drafted[0] == drafted[1]
    assert drafted[2][0][1][0] == (drafted[0][0][1][0] + 1) % 320  # each token's score is the one before's


def test_a_small_model_is_no_head(target, drafter_folder, tmp_path):
    save_model(tmp_path / "one", num_hidden_layers=1)
    (tmp_path / "nothing").mkdir()
    names = [target, drafter_folder, tmp_path / "one", tmp_path / "nothing", tmp_path / "nowhere"]
    assert not any(is_eagle(str(name)) for name in names)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t, c: t.pop("fc.bias"), "missing fc.bias"),
        (lambda t, c: t.pop("layers.0.mlp.up_proj.weight"), "missing layer.mlp.up_proj.weight"),
        (lambda t, c: t.update(extra=torch.zeros(1)), "unexpected extra"),
        (lambda t, c: t.update({"layers.0.input_layernorm.weight": torch.ones(48)}), "unexpected layer.input_layern"),
        (lambda t, c: t.update({"layers.1.mlp.up_proj.weight": torch.ones(4)}), "unexpected layers.1.mlp.up_proj"),
        (lambda t, c: t.update({"fc.weight": torch.zeros(48, 48)}), r"fc.weight: expected \[48, 96\], got \[48, 48\]"),
        (lambda t, c: t.update({"embed_tokens.weight": torch.zeros(320, 32)}), "embed_tokens.weight: expected 48 col"),
        (lambda t, c: t.update({"lm_head.weight": torch.zeros(9, 48)}), r"lm_head.weight: expected \[320, 48\], as"),
        (lambda t, c: c.pop("intermediate_size"), "expected the fields intermediate_size"),
        (lambda t, c: c.update(num_hidden_layers=2), "num_hidden_layers: expected 1, got 2"),
        (lambda t, c: c.update(hidden_size=64), "hidden size 48, got one for 64"),
        (lambda t, c: c.update(layernorms=True), "layernorms: expected False, got True, which is not supported"),
        (
            lambda t, c: c.update(speculators_model_type="independent"),
            "speculators_model_type: expected eagle, got independent",
        ),
    ],
)
def test_heads_that_do_not_fit_are_refused(damage, message, target, tmp_path):
    tensors, config = eagle_tensors(torch.zeros(320, 48)), dict(CONFIG)
    damage(tensors, config)
    head = save_authors(tmp_path / "head", tensors)
    (head / "config.json").write_text(json.dumps(config))
    with pytest.raises(specstep.BuildError, match=message):
        specstep.eager(str(target), drafter=str(head), dtype="float32", max_seq_len=96)
