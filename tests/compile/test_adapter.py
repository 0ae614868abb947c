"""Adapters are merged as PEFT merges them, and what is not understood of one is refused."""

import json
import math

import pytest
import torch
from models import save_model, tiny_model, tiny_tokenizer
from safetensors.torch import save_file
from specstep.compile.source import load_source, load_tokenizer
from specstep.errors import BuildError

LAYER = "model.layers.1.self_attn.q_proj"


def save_adapter(folder, tensors, **config):
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 6} | config))
    save_file(
        {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors"
    )
    return folder


def factors(layer, depth, outputs, rank=4):
    torch.manual_seed(1)
    return {f"{layer}.lora_A.weight": torch.randn(rank, depth), f"{layer}.lora_B.weight": torch.randn(outputs, rank)}


def merged(tmp_path, tensors, architecture="Llama", **config):
    """The model with an adapter, and its weights before."""
    base = save_model(tmp_path / "base", architecture)
    before = {name: p.detach().clone() for name, p in tiny_model(architecture).named_parameters()}
    adapter = save_adapter(tmp_path / "adapter", tensors, **config)
    return load_source(str(base), "float32", "cpu", str(adapter)), before


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 6 / 4),
        ({"use_rslora": True}, 6 / math.sqrt(4)),
        ({"alpha_pattern": {"q_proj": 10}}, 10 / 4),
        ({"alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 10}}, 6 / 4),
    ],
)
def test_the_product_of_the_factors_is_added(config, scale, tmp_path):
    tensors = factors(LAYER, 48, 48)
    source, before = merged(tmp_path, tensors, **config)
    change = tensors[f"{LAYER}.lora_B.weight"] @ tensors[f"{LAYER}.lora_A.weight"] * scale
    for name, weight in source.model.named_parameters():
        expected = before[name] + change if name == f"{LAYER}.weight" else before[name]
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-6)
    assert source.adapter == str(tmp_path / "adapter")


def test_weights_that_stand_the_other_way_round(tmp_path):
    layer = "transformer.h.0.attn.c_attn"
    tensors = factors(layer, 48, 144)
    source, before = merged(tmp_path, tensors, "GPT2", fan_in_fan_out=True)
    change = (tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"] * 1.5).T
    got = source.model.get_parameter(f"{layer}.weight")
    torch.testing.assert_close(got, before[f"{layer}.weight"] + change, rtol=1e-6, atol=1e-6)


def test_embeddings_and_whole_modules(tmp_path):
    torch.manual_seed(0)
    head, down, up = torch.randn(320, 48), torch.randn(4, 320), torch.randn(48, 4)
    embedding = "model.embed_tokens"
    tensors = {"lm_head.weight": head, f"{embedding}.lora_embedding_A": down, f"{embedding}.lora_embedding_B": up}
    source, before = merged(tmp_path, tensors)
    assert torch.equal(source.model.lm_head.weight, head)
    expected = before[f"{embedding}.weight"] + (up @ down * 1.5).T
    torch.testing.assert_close(source.model.get_input_embeddings().weight.data, expected, rtol=1e-5, atol=1e-5)


def test_a_weight_that_layers_share_is_refused(tmp_path):
    """Merged, a change of the embedding would be one of the head as well."""
    base = save_model(tmp_path / "base", tie_word_embeddings=True)
    name = "model.embed_tokens.lora_embedding_"
    adapter = save_adapter(tmp_path / "adapter", {f"{name}A": torch.ones(4, 320), f"{name}B": torch.ones(48, 4)})
    with pytest.raises(BuildError, match="embed_tokens: expected a weight of its own, got one that layers share"):
        load_source(str(base), "float32", "cpu", str(adapter))


def test_a_whole_module_that_layers_share_is_taken_where_it_is_as_it_was(tmp_path):
    """peft gives each its own: as one, a new head would be a new embedding as well."""
    base = save_model(tmp_path / "base", tie_word_embeddings=True)
    kept = load_source(str(base), "float32", "cpu").model.lm_head.weight.detach()
    same = save_adapter(tmp_path / "same", {"lm_head.weight": kept.clone()})
    assert torch.equal(load_source(str(base), "float32", "cpu", str(same)).model.lm_head.weight, kept)
    other = save_adapter(tmp_path / "other", {"lm_head.weight": kept + 1})
    with pytest.raises(BuildError, match=r"lm_head.weight: expected a weight of its own, got one that .* and .* share"):
        load_source(str(base), "float32", "cpu", str(other))


def test_one_adapter_on_another_is_refused(tmp_path):
    base = save_model(tmp_path / "base")
    named = {"base_model_name_or_path": str(base)}
    first, second = (save_adapter(tmp_path / name, factors(LAYER, 48, 48), **named) for name in ("first", "second"))
    with pytest.raises(BuildError, match=r"expected a model and one adapter, got .*second on .*first, which is one"):
        load_source(str(first), "float32", "cpu", str(second))


def test_an_adapter_beside_a_model_is_refused(tmp_path):
    """peft would add it, transformers without peft would not."""
    named = {"base_model_name_or_path": str(save_model(tmp_path / "base"))}
    both = save_adapter(tmp_path / "both", factors(LAYER, 48, 48), **named)
    save_model(both)
    with pytest.raises(BuildError, match="expected a model or an adapter, got both; give one of them"):
        load_source(str(both), "float32", "cpu")
    (both / "model.safetensors").unlink()  # the model's config may lie beside an adapter
    assert load_source(str(both), "float32", "cpu").name == named["base_model_name_or_path"]


def test_an_adapter_names_its_model_and_has_its_own_tokenizer(tmp_path):
    base = save_model(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", factors(LAYER, 48, 48), base_model_name_or_path="base")
    tiny_tokenizer().save_pretrained(adapter)
    source = load_source(str(adapter), "float32", "cpu")
    given = load_source(str(base), "float32", "cpu", str(adapter))
    assert source.tokenizer.chat_template and source.name == str(base)
    assert load_tokenizer(str(adapter))[1] == 320 and load_tokenizer(str(adapter))[0].chat_template
    assert all(torch.equal(a, b) for a, b in zip(source.model.parameters(), given.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({}, {"peft_type": "IA3"}, "peft_type: expected LORA, got IA3"),
        ({}, {"use_dora": True}, "use_dora: expected False, got True; merge it with peft"),
        ({}, {"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: expected True or .*, got pissa_niter_4; "),
        ({}, {"alora_invocation_tokens": [5]}, r"alora_invocation_tokens: expected None, got \[5\]; merge it with"),
        (factors("model.layers.9.q", 48, 48), {}, "model.layers.9.q: expected a layer of the model and both"),
        (factors(LAYER, 48, 47), {}, r"expected shape \(48, 48\), got \(47, 48\)"),
        ({f"{LAYER}.lora_A.weight": torch.ones(4, 48)}, {}, "expected a layer of the model and both of its factors"),
        ({f"{LAYER}.lora_magnitude_vector": torch.ones(48)}, {}, "expected tensors of LoRA, got .*lora_magnitude"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(tensors, config, message, tmp_path):
    with pytest.raises(BuildError, match=message) as error:
        merged(tmp_path, tensors, **config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{"], ids=["deep", "a list", "cut"])
def test_a_damaged_adapter_is_one_line(text, tmp_path):
    adapter = save_adapter(tmp_path / "adapter", factors(LAYER, 48, 48))
    (adapter / "adapter_config.json").write_text(text)
    with pytest.raises(BuildError, match=r"adapter: .*adapter_config.json: expected (JSON|an object), got") as error:
        load_source(str(adapter), "float32", "cpu")
    assert "\n" not in str(error.value)


def test_an_adapter_without_its_model(tmp_path):
    adapter = save_adapter(tmp_path / "adapter", factors(LAYER, 48, 48))
    with pytest.raises(BuildError, match="expected a model, got None; give the model"):
        load_source(str(adapter), "float32", "cpu")
    with pytest.raises(BuildError, match="adapter: expected a directory with adapter_config"):
        load_source(str(save_model(tmp_path / "base")), "float32", "cpu", str(tmp_path))
