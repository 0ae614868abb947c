"""P-EAGLE: all depths from one pass over an EAGLE-3 head, against a plain re-computation; exact output."""

import json

import pytest
import specstep
import torch
from models import greedy, save_eagle3, save_model, tiny_model
from plain_eagle3 import chains, hidden_states, plain_head, plain_layer, rms
from safetensors.torch import load_file, save_file

MASK, LAYERS = 311, 3
PROMPTS = [[5], [7, 8], [40, 41, 42] * 9, list(range(200, 253))]
TREES = [
    {"tree": "chain", "nodes": 4},
    {"tree": "static", "nodes": 9, "depth": 3, "top_k": 3},
    {"tree": "dynamic", "nodes": 11, "depth": 4, "top_k": 3},
]
OPTIONS = {"dtype": "float32", "max_seq_len": 96}


def save_peagle(folder, **changes):
    """Write a random P-EAGLE head of three layers, as speculators does."""
    save_eagle3(folder, num_hidden_layers=LAYERS, speculators_model_type="peagle", mask_token_id=MASK)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items()}
    for index in range(1, LAYERS):
        for name, tensor in [*tensors.items()]:
            if name.startswith("layers.0.") and "hidden_norm" not in name:
                wide = any(part in name for part in ("q_proj", "k_proj", "v_proj"))
                shape = (tensor.shape[0], 48) if wide else tensor.shape
                tensors[name.replace("layers.0", f"layers.{index}")] = torch.randn(shape) * 0.2 + ("norm" in name)
    tensors["mask_hidden"] = torch.randn(1, 1, 3 * 48)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def save_of_qwen3(folder):
    """One whose layers are Qwen3's."""
    save_peagle(folder)
    tensors = load_file(folder / "model.safetensors")
    for index in range(LAYERS):
        tensors |= {f"layers.{index}.self_attn.{part}_norm.weight": 1 + torch.randn(12) / 2 for part in "qk"}
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "target")
    save_peagle(folder / "head")
    save_of_qwen3(folder / "qwen3")
    return folder


@torch.no_grad()
def plain_chain(w, model, tokens, depth, behind=0):
    """The chain after these tokens from one pass; with `behind` more masks than it takes, each depth a slot late."""
    features = torch.cat(hidden_states(model, tokens)[:3], -1)[:-1]  # the root has no feature yet
    masks = depth - 1 + behind
    hidden = torch.cat([features, w["mask_hidden"][0].expand(masks, -1)]) @ w["fc.weight"].T
    embedded = model.get_input_embeddings()(torch.tensor([*tokens[1:], *[MASK] * masks]))
    first = {name.replace("layers.0", "midlayer"): tensor for name, tensor in w.items()}
    _, hidden = plain_head(first, embedded, hidden)
    for index in range(1, LAYERS):
        name = f"layers.{index}."
        hidden = plain_layer(w, name, rms(hidden, w[f"{name}input_layernorm.weight"]), hidden)
    found = (rms(hidden, w["norm.weight"]) @ w["lm_head.weight"].T)[-depth:].argmax(-1)
    return (found + w["d2t"][found]).tolist()


@pytest.mark.parametrize("nodes", [[None] * 16, [0, 0, 0, 4, 1, 2, 0, 3, 1, 1, 4, 0, 2]], ids=["all", "any"])
@pytest.mark.parametrize("head", ["head", "qwen3"])
def test_drafts_are_those_of_a_plain_recomputation(head, nodes, folder):
    engine = specstep.eager(str(folder / "target"), drafter=str(folder / head), tree="chain", nodes=4, **OPTIONS)
    w, model = load_file(folder / head / "model.safetensors"), tiny_model("Llama")
    found = list(chains(engine, nodes))
    assert all(got == plain_chain(w, model, tokens, 4) for tokens, got in found)
    assert any(got != plain_chain(w, model, tokens, 4, behind=1) for tokens, got in found), "the control: a slot late"
    if head == "qwen3":
        without = {name: tensor for name, tensor in w.items() if "q_norm" not in name}
        assert any(got != plain_chain(without, model, tokens, 4) for tokens, got in found), "the control: no norms"
    w["mask_hidden"] = torch.zeros_like(w["mask_hidden"])
    assert any(got != plain_chain(w, model, tokens, 4) for tokens, got in found), "the control: nothing behind the root"


@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "mixed"])
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree["tree"])
def test_output_equals_transformers(tree, mixed, folder):
    model = tiny_model("Llama")
    expected = [greedy(model, prompt, 30, [1]) for prompt in PROMPTS]
    drafter = ("ngram," if mixed else "") + str(folder / "head")
    engine = specstep.eager(str(folder / "target"), drafter=drafter, max_batch=3, **OPTIONS, **tree)
    assert [result.token_ids for result in engine.generate(PROMPTS, 30)] == expected


def test_sampled_texts_are_those_of_plain_decoding(folder):
    asked = [specstep.SamplingParams(temperature=0.9, seed=seed) for seed in range(2)]
    texts = []
    for drafter in ("none", str(folder / "head")):
        engine = specstep.eager(str(folder / "target"), drafter=drafter, max_batch=2, **OPTIONS)
        texts.append([engine.generate(prompt, 25, sampling=s).token_ids for prompt in PROMPTS for s in asked])
    assert texts[0] == texts[1]


def test_every_name_of_the_mask_token_is_known(folder, tmp_path):
    """And a config without the type that speculators writes, and with its nested one."""
    w, model = load_file(folder / "head" / "model.safetensors"), tiny_model("Llama")
    inner = {key: json.loads((folder / "head" / "config.json").read_text())[key] for key in (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers",
        "rms_norm_eps", "rope_theta", "max_position_embeddings", "vocab_size",
    )}  # fmt: skip
    for index, changes in enumerate((
        {"mask_token_id": None, "pard_token": MASK, "speculators_model_type": None},
        {"mask_token_id": None, "ptd_token_id": MASK, "speculators_model_type": None},
        {"transformer_layer_config": inner} | dict.fromkeys(inner),
    )):  # fmt: skip
        head = save_peagle(tmp_path / str(index), **changes)
        save_file(w, head / "model.safetensors")
        engine = specstep.eager(str(folder / "target"), drafter=str(head), tree="chain", nodes=3, **OPTIONS)
        assert all(got == plain_chain(w, model, tokens, 3) for tokens, got in chains(engine, [None] * 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": 320}, "mask token: expected an id from 0 to 319, got 320"),
        ({"mask_token_id": "x"}, "mask_token_id or pard_token or ptd_token_id: expected the mask token's id, got 'x'"),
        ({"mask_token_id": None}, "expected the mask token's id, got None"),
        ({"speculators_model_type": "eagle3"}, "expected peagle beside a mask token, got eagle3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected at least 1, got 0"),
        ({"num_hidden_layers": 2}, "unexpected layers.2.input_layernorm.weight"),
        ({"layer_types": ["sliding_attention"]}, "layer_types: expected full_attention alone, got sliding_attention"),
        ({"hidden_size": 64}, "expected a head for a target of hidden size 48, got one for 64"),
    ],
)
def test_heads_that_do_not_fit_are_refused(changes, message, folder, tmp_path):
    head = save_peagle(tmp_path / "head", **changes)
    with pytest.raises(specstep.BuildError, match=message):
        specstep.eager(str(folder / "target"), drafter=str(head), **OPTIONS)


@pytest.mark.slow
def test_an_engine_with_it(folder, tmp_path):
    specstep.build(str(folder / "target"), tmp_path / "engine", drafter=str(folder / "head"), max_batch=2, **OPTIONS)
    expected = [greedy(tiny_model("Llama"), prompt, 30, [1]) for prompt in PROMPTS]
    with specstep.load(tmp_path / "engine") as engine:
        assert [result.token_ids for result in engine.generate(PROMPTS, 30)] == expected
