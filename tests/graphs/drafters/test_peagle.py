"""P-EAGLE: all depths from one pass over an EAGLE-3 head, against a plain re-computation; exact output."""

import json
import shutil
from pathlib import Path

import pytest
import specstep
import torch
from cycle import FIRST, SIZE, TOKENS, accepted, save_cycle, to_axis, to_scores
from models import greedy, save_eagle3, save_model, tiny_model
from plain_eagle3 import chains, hidden_states, plain_head, plain_layer, rms
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.usefixtures("as_published")

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
def plain_chain(w, model, tokens, depth, behind=0, windows=(0,) * LAYERS):
    """The chain after these tokens from one pass; with `behind` more masks than it takes, each depth a slot late.
    windows: what each layer sees."""
    features = torch.cat(hidden_states(model, tokens)[:3], -1)[:-1]  # the root has no feature yet
    masks = depth - 1 + behind
    hidden = torch.cat([features, w["mask_hidden"][0].expand(masks, -1)]) @ w["fc.weight"].T
    embedded = model.get_input_embeddings()(torch.tensor([*tokens[1:], *[MASK] * masks]))
    first = {name.replace("layers.0", "midlayer"): tensor for name, tensor in w.items()}
    _, hidden = plain_head(first, embedded, hidden, windows[0])
    for index in range(1, LAYERS):
        name = f"layers.{index}."
        hidden = plain_layer(w, name, rms(hidden, w[f"{name}input_layernorm.weight"]), hidden, windows[index])
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


@torch.no_grad()
@pytest.mark.parametrize("kind", ["head", "qwen3"])
def test_each_layer_attends_to_its_window(kind, folder, tmp_path):
    head = Path(shutil.copytree(folder / kind, tmp_path / "head"))
    config = json.loads((head / "config.json").read_text())
    types = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 6}
    (head / "config.json").write_text(json.dumps(config | types))
    engine = specstep.eager(str(folder / "target"), drafter=str(head), tree="chain", nodes=4, **OPTIONS)
    w, model = load_file(head / "model.safetensors"), tiny_model("Llama")
    found = list(chains(engine, [None] * 10))
    for windows in ((6, 0, 6), (0, 0, 6), (6, 0, 0), (6, 6, 6), (5, 0, 6), (6, 0, 7)):
        same = all(got == plain_chain(w, model, tokens, 4, windows=windows) for tokens, got in found)
        assert same == (windows == (6, 0, 6)), windows


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
        (
            {"layer_types": ["full_attention"]},
            "layer_types: expected full_attention or .* for each of 3 layers, got",
        ),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window: expected at least 1 beside .*, got None"),
        ({"hidden_size": 64}, "expected a head for a target of hidden size 48, got one for 64"),
    ],
)
def test_heads_that_do_not_fit_are_refused(changes, message, folder, tmp_path):
    head = save_peagle(tmp_path / "head", **changes)
    with pytest.raises(specstep.BuildError, match=message):
        specstep.eager(str(folder / "target"), drafter=str(head), **OPTIONS)


def knowing(tensors, reads, off=0, ahead=1):
    """A head that knows what comes after each token: from the token of the slot ahead, or from its own hidden state.
    In each of its layers a slot takes what the slot ahead has, moved on by one place: a mask behind the root has its
    answer from the first layer on, the next one from the second on. One more dimension is the same in every slot:
    attention reads it, and chooses by place alone. off: places too far; ahead: which slot is read."""
    w = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    w |= {name: torch.ones_like(tensor) for name, tensor in tensors.items() if "norm" in name}
    content = torch.eye(SIZE) * ((torch.arange(SIZE) >= FIRST) & (torch.arange(SIZE) < TOKENS))
    constant, length = 100.0, SIZE**0.5  # so much is the constant: next to it, contents change no norm
    if reads == "hidden state":
        w["fc.weight"][:, :SIZE] = to_axis(1 + off) @ content
    w["fc.weight"][-1, :TOKENS] = constant
    w["mask_hidden"][..., 0] = 1.0  # the axis of a token that is in no answer: no content
    angle = ahead * 10000.0 ** -(torch.arange(0, 12, 2) / 12)
    key = torch.cat([torch.ones(6), torch.zeros(6)]).repeat(4) * 2
    query = torch.cat([angle.cos(), -angle.sin()]).repeat(4) * 2  # the score is highest so far ahead
    for index in range(LAYERS):
        name, token = f"layers.{index}.self_attn.", index == 0 and reads == "token"
        w[f"{name}q_proj.weight"][:, -1], w[f"{name}k_proj.weight"][:, -1] = query, key
        value = w[f"{name}v_proj.weight"]
        value[:, slice(0, SIZE) if token else slice(-SIZE, None)] = content * ((1 if token else constant) / length)
        w[f"{name}o_proj.weight"].copy_(to_axis(1 + off if token else 1))
    return w | {"lm_head.weight": to_scores(), "d2t": tensors["d2t"]}


def save_knowing(folder, mask=1, **planted):
    """Write such a head, of the cycle's tokens."""
    head = save_peagle(folder, num_key_value_heads=4, vocab_size=TOKENS, draft_vocab_size=TOKENS, mask_token_id=mask)
    rows = {"k_proj": SIZE, "v_proj": SIZE, "lm_head": TOKENS, "d2t": TOKENS}
    tensors = load_file(head / "model.safetensors")
    for part, count in rows.items():
        for name in [name for name in tensors if part in name]:
            tensors[name] = tensors[name].new_zeros(count, *tensors[name].shape[1:])
    return head, knowing(tensors, **planted)


@pytest.mark.parametrize(
    ("planted", "expected"),
    [
        ({"reads": "token"}, {1 + LAYERS: 5}),
        ({"reads": "hidden state"}, {1 + LAYERS: 5}),
        ({"reads": "token", "off": 1}, {0: 24}),
        ({"reads": "hidden state", "off": 1}, {0: 24}),
        ({"reads": "token", "mask": FIRST + 3}, {LAYERS: 6}),
        ({"reads": "hidden state", "ahead": 2}, {0: 24}),
    ],
    ids=["token", "hidden state", "token off", "hidden state off", "another mask token", "another slot"],
)
def test_a_head_that_knows_the_answer_is_always_right(planted, expected, tmp_path):
    """In as many depths as it has layers, and one more. One that is a place off never is. A mask that is a token of the
    text drowns what reaches the last depth."""
    head, tensors = save_knowing(tmp_path / "head", **planted)
    save_file(tensors, head / "model.safetensors")
    engine = specstep.eager(
        str(save_cycle(tmp_path / "cycle")), drafter=str(head), tree="chain", nodes=1 + LAYERS, **OPTIONS
    )
    assert accepted(engine, (5, 6, 7, 8, 9, 10)) == expected


def test_masks_read_their_own_hidden_state(tmp_path):
    """Not the last feature, nor nothing: with another token's in it, the first depth alone is right."""
    head, tensors = save_knowing(tmp_path / "head", reads="hidden state")
    tensors["mask_hidden"][..., FIRST + 5] = 30.0
    save_file(tensors, head / "model.safetensors")
    folder = str(save_cycle(tmp_path / "cycle"))
    engine = specstep.eager(folder, drafter=str(head), tree="chain", nodes=1 + LAYERS, **OPTIONS)
    assert accepted(engine, (5, 6, 7, 8, 9, 10)) == {1: 12}


@pytest.mark.slow
def test_an_engine_with_it(folder, tmp_path):
    specstep.build(str(folder / "target"), tmp_path / "engine", drafter=str(folder / "head"), max_batch=2, **OPTIONS)
    expected = [greedy(tiny_model("Llama"), prompt, 30, [1]) for prompt in PROMPTS]
    with specstep.load(tmp_path / "engine") as engine:
        assert [result.token_ids for result in engine.generate(PROMPTS, 30)] == expected
