"""config.json of EAGLE-3 heads as they are published: the hidden states that each convention means."""

import json

import pytest
import specstep
import torch
from models import ARCHITECTURES, final_norm, save_eagle3, save_model, tiny_model
from plain_eagle3 import chains, plain_chain
from safetensors.torch import load_file
from specstep.compile.drafters.eagle3_config import read_config
from specstep.graphs.drafters.eagle3 import Eagle3Head
from specstep.graphs.kept import UnsupportedModel, cache_layers
from specstep.graphs.target import body, capture_last_layer, check_hidden_states

pytestmark = pytest.mark.usefixtures("as_published")

AUX, SPECULATORS = (
    "eagle_aux_hidden_state_layer_ids",
    {"speculators_model_type": "eagle3", "norm_before_residual": False},
)
CONVENTIONS = {  # what a config.json has, for a target of eight layers, and the hidden states that it means
    "none": ({AUX: None}, (2, 4, 5)),
    "nested, outputs": ({AUX: None, "eagle_config": {AUX: [1, 3, 4], "use_aux_hidden_state": True}}, (2, 4, 5)),
    "nested, as a set gives them": ({AUX: None, "eagle_config": {AUX: [1, 4, 3]}}, (2, 4, 5)),
    "nested, to the last": ({AUX: None, "eagle_config": {AUX: [1, 5, 7]}}, (2, 6, 8)),
    "nested, inputs": ({AUX: None, "eagle_config": {AUX: [2, 4, 5]}}, (2, 4, 5)),
    "nested, boundaries": ({AUX: None, "eagle_config": {AUX: [5, 6, 8], "norm_before_fc": True}}, (5, 6, 8)),
    "both": ({AUX: [1, 2, 3], "eagle_config": {AUX: [1, 2, 3]}}, (2, 3, 4)),
    "top": ({AUX: [1, 5, 8]}, (1, 5, 8)),
    "top, unsorted": ({AUX: [5, 2, 4]}, (2, 4, 5)),
    "ours, in their order": ({AUX: [5, 2, 4], "specstep": {}}, (5, 2, 4)),
    "five": ({AUX: [1, 2, 4, 6, 7]}, (1, 2, 4, 6, 7)),
    "DeepSpec": ({AUX: None, "target_layer_ids": [0, 1, 3, 5, 6]}, (1, 2, 4, 6, 7)),
    "speculators": ({AUX: [2, 4, 5], "norm_before_fc": True, "target_hidden_size": None} | SPECULATORS, (2, 4, 5)),
    "speculators, converted": ({AUX: [1, 3, 4]} | SPECULATORS, (2, 4, 5)),
}


@pytest.fixture(scope="module")
def deep_target(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("deep"), num_hidden_layers=8)


@torch.no_grad()
@pytest.mark.parametrize("name", CONVENTIONS)
def test_every_published_convention_of_auxiliary_layers(name, deep_target, tmp_path):
    changes, layers = CONVENTIONS[name]
    flags = {key: (changes.get("eagle_config") or changes).get(key, False) for key in ("norm_before_fc",)}
    head = save_eagle3(tmp_path / "head", features=len(layers), **flags, **{AUX: None})
    config = json.loads((head / "config.json").read_text()) | changes
    if "speculators_model_type" in config:
        moved = [key for key in config if key not in {AUX, "architectures", "draft_vocab_size", *changes}]
        config["transformer_layer_config"] = {key: config.pop(key) for key in moved}
    if "eagle_config" in changes:
        config.pop("norm_before_fc")
    (head / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    options = {"dtype": "float32", "max_seq_len": 96, "tree": "chain", "nodes": 3}
    engine = specstep.eager(str(deep_target), drafter=str(head), **options)
    weights, model = load_file(head / "model.safetensors"), tiny_model("Llama", num_hidden_layers=8)
    found = chains(engine, [None] * 5)
    assert [got for _, got in found] == [plain_chain(weights, model, tokens, 3, layers) for tokens, _ in found]
    lower = tuple(layer - 1 for layer in layers)
    assert [got for _, got in found] != [plain_chain(weights, model, tokens, 3, lower) for tokens, _ in found]


def test_null_is_no_setting(tmp_path):
    """A field that is null at the top level says nothing against the one in `eagle_config`."""
    head = save_eagle3(tmp_path / "head")
    found = []
    for changes in ({"norm_output": None, "eagle_config": {"norm_output": True}}, {"norm_output": None}):
        config = json.loads((head / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps(config))
        found.append(read_config(tmp_path / "config.json", 48, 8, 320).norm_feedback)
    assert found == [True, False]


@pytest.mark.parametrize(
    ("changes", "fed", "open_"),
    [
        ({"norm_output": True}, True, True),
        ({"norm_output": True, "norm_feedback": False}, False, False),
        ({"norm_output": True, "norm_feedback": True}, True, False),
        ({"norm_output": True, "specstep": {}}, True, False),
        ({"norm_output": False}, False, False),
        ({}, False, False),
    ],
)
def test_norm_output_may_speak_of_the_logits_alone(changes, fed, open_, tmp_path):
    """SpecForge trains such heads with the hidden state ahead of the norm, others with that behind it."""
    save_eagle3(tmp_path, **changes)
    config = read_config(tmp_path / "config.json", 48, 8, 320)
    head = Eagle3Head(config)
    assert (head.feeds_normed, len(head.unsaid_of_levels())) == (fed, open_) and not head.unsaid()
    for unsaid in head.unsaid_of_levels():
        unsaid.swap()
        assert head.feeds_normed != fed
        unsaid.swap()
        assert head.feeds_normed == fed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "unheard"}, "unheard"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size: expected a number of tokens, got 'many'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "factor"),
    ],
)
def test_fields_that_no_layer_can_have_are_refused(change, message, model_folder, tmp_path):
    head = save_eagle3(tmp_path / "head")
    (head / "config.json").write_text(json.dumps(json.loads((head / "config.json").read_text()) | change))
    with pytest.raises(specstep.BuildError, match=message):
        specstep.eager(str(model_folder), drafter=str(head), dtype="float32")


@pytest.mark.parametrize("odd", ["eagle3", [AUX], True])
def test_an_eagle_config_that_is_no_object_is_refused(odd, tmp_path):
    head = save_eagle3(tmp_path / "head")
    config = json.loads((head / "config.json").read_text()) | {"eagle_config": odd}
    (head / "config.json").write_text(json.dumps(config))
    with pytest.raises(specstep.BuildError, match="eagle_config: expected an object or null, got "):
        read_config(head / "config.json", 48, 8, 320)


def test_the_last_layer_is_captured_ahead_of_the_final_norm_or_refused(monkeypatch):
    for architecture in ARCHITECTURES:
        model = tiny_model(architecture)
        if architecture == "Gemma3nText":
            with pytest.raises(UnsupportedModel, match="hand on several hidden states of a token"):
                check_hidden_states(model)
            continue
        check_hidden_states(model)
        if not cache_layers(model):
            with pytest.raises(UnsupportedModel, match="layer cannot be captured ahead of its final norm"):
                capture_last_layer(model)
            continue
        capture_last_layer(model)
        out = body(model)(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False, output_hidden_states=True)
        torch.testing.assert_close(final_norm(model)(out.hidden_states[-1]), out.last_hidden_state)
    monkeypatch.setattr(type(body(model)), "forward", lambda self, **_: Always())
    with pytest.raises(UnsupportedModel, match=rf"{architecture}.*layer cannot be captured ahead of its final norm"):
        capture_last_layer(model)


class Always:
    """The output of a model that gives its normed state twice."""

    last_hidden_state = torch.ones(1)
    hidden_states = (last_hidden_state,)
