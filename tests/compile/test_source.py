"""Loading models: other libraries say nothing to the user, ask nothing, and run no code of a model's own."""

import json
import shutil
import warnings

import pytest
import specstep
import torch
from models import tiny_model
from safetensors.torch import save_file
from specstep.compile.source import load_source, load_tokenizer
from specstep.errors import BuildError
from transformers import Gemma3nConfig

OPTIONS = {"drafter": "none", "dtype": "float32", "max_batch": 1, "max_seq_len": 64, "prefill_chunk": 16}


def test_a_model_is_loaded_traced_and_checked_without_a_word_of_others(model_folder, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        specstep.eager(str(model_folder), **OPTIONS).close()
    assert capfd.readouterr() == ("", "")


def test_the_language_model_of_gemma_3n_is_loaded_alone(tmp_path):
    """Its images would want a package that nobody needs for text."""
    model = tiny_model("Gemma3nText")
    folder, text = tmp_path / "model", model.config
    Gemma3nConfig(text_config=text.to_dict()).save_pretrained(folder)
    state = {f"model.language_{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    del state["model.language_lm_head.weight"]
    towers = ("vision_tower.timm_model.conv_stem.conv.weight", "audio_tower.conformer.0.norm.weight",
              "embed_vision.embedding.weight", "embed_audio.soft_embedding_norm.weight")  # fmt: skip
    state |= {f"model.{name}": torch.ones(3) for name in towers}
    save_file(state | {"lm_head.weight": model.lm_head.weight.clone()}, folder / "model.safetensors", {"format": "pt"})
    source = load_source(str(folder), "float32", "cpu")
    for name, tensor in model.state_dict().items():
        assert torch.equal(source.model.state_dict()[name], tensor), name
    assert load_tokenizer(str(folder)) == (None, 320)


@pytest.fixture
def asks(monkeypatch):
    """Fails where somebody asks at the terminal."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked at the terminal"))


def altered(model_folder, tmp_path, file, **fields):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    config = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(config | fields))
    (folder / "own.py").write_text("raise SystemExit('code of the model ran')")
    return str(folder)


REFUSED = "with code of its own, which is never run; take a model of transformers' own architectures$"


def test_code_of_a_model_is_refused_in_one_line(model_folder, tmp_path, asks):
    own = {name: f"own.{name}" for name in ("AutoConfig", "AutoModelForCausalLM")}
    name = altered(model_folder, tmp_path, "config.json", model_type="own", auto_map=own)
    for load in (lambda: load_source(name, "float32", "cpu"), lambda: load_tokenizer(name)):
        with pytest.raises(BuildError, match=f"^model: .*: expected a causal language model, got one {REFUSED}"):
            load()


def test_code_of_a_tokenizer_is_refused_in_one_line(model_folder, tmp_path, asks):
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    name = altered(model_folder, tmp_path, "tokenizer_config.json", **own)
    with pytest.raises(BuildError, match=f"^model: .*: expected a fast tokenizer, got one {REFUSED}"):
        load_source(name, "float32", "cpu")
