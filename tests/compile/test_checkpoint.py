"""A directory of transformers' files: nothing of it is lost without a word."""

from types import SimpleNamespace

import pytest
import torch
from models import save_model, tiny_model, tiny_tokenizer
from safetensors.torch import load_file, save_file
from specstep.compile.checkpoint import check_all_taken, note_tokens
from specstep.compile.source import load_source
from specstep.errors import BuildError


def with_tensors(folder, **tensors):
    save_model(folder)
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}, path)
    return str(folder)


def test_tensors_that_the_model_does_not_take_are_named(tmp_path):
    bias = {f"model__layers__{layer}__self_attn__q_proj__bias": torch.ones(48) for layer in range(3)}
    with pytest.raises(
        BuildError, match=r"expected tensors that LlamaForCausalLM takes, got model\.layers\.0\.self_attn"
    ):
        load_source(with_tensors(tmp_path / "a", **bias), "float32", "cpu")
    scale = {"model__layers__1__mlp__up_proj__weight_scale": torch.ones(1)}
    with pytest.raises(BuildError, match=r"takes, got model\.layers\.1\.mlp\.up_proj\.weight_scale; a bias wants"):
        load_source(with_tensors(tmp_path / "b", **scale), "float32", "cpu")


def test_tensors_that_change_nothing_are_left(tmp_path):
    names = (
        "model__layers__0__self_attn__rotary_emb__inv_freq",
        "model__layers__3__eh_proj__weight",
        "mtp__fc__weight",
    )
    folder = with_tensors(tmp_path / "a", **{name: torch.ones(6) for name in names})
    assert load_source(folder, "float32", "cpu").stop_ids == (1,)


def test_a_config_need_not_say_whether_weights_are_tied():
    """As those of Inkling."""
    model = tiny_model("Llama")
    model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=3))
    check_all_taken("it", model, [])
    with pytest.raises(BuildError, match=r"takes, got lm_head\.weight"):
        check_all_taken("it", model, ["lm_head.weight"])


def test_tokens_that_will_not_work_are_told_of():
    tokenizer, said = tiny_tokenizer(), []
    note_tokens(tokenizer, (1,), 320, said.append)
    note_tokens(None, (1,), 320, said.append)
    assert said == []
    tokenizer.chat_template = None
    note_tokens(tokenizer, (1, 500), 200, said.append)
    assert "eos_token_id: expected ids below 200, got [500]: no answer ends with it" in said[0]
    assert "expected tokens of the 200 rows of the embedding, got" in said[1]
    assert "no chat template" in said[2]
