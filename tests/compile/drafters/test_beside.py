"""What --drafter auto finds inside and beside a model's directory."""

import dataclasses

import pytest
import torch
from block_drafters import PUBLISHED, block_tensors, save_block
from models import ARCHITECTURES, save_eagle3, save_model, tiny_model
from mtp_modules import GLM, add_module, module_tensors, nemotron_h_module, write_module
from specstep.compile.config import EngineConfig
from specstep.compile.drafters.beside import heads_beside
from specstep.compile.drafters.choose import fitting_drafters, make_drafter
from specstep.compile.drafters.published import INDEX, config_of, weight_files
from specstep.compile.source import load_source


def test_a_head_beside_the_model_is_found(tmp_path):
    """In a folder of the model's or next to it under its name; not one for another target, nor one without weights."""
    source = load_source(str(save_model(tmp_path / "tiny", tokenizer=True)), "float32", "cpu")
    assert heads_beside(source) == [] and fitting_drafters(source) == ["ngram"]
    save_eagle3(tmp_path / "other-head")
    save_eagle3(tmp_path / "tiny-wide", target_hidden=64)
    bare = save_eagle3(tmp_path / "tiny-bare")
    next(bare.glob("*.safetensors")).unlink()
    (tmp_path / "tiny" / "notes").mkdir()
    (tmp_path / "tiny-broken").mkdir()
    (tmp_path / "tiny-broken" / "config.json").write_text("[")
    assert heads_beside(source) == []
    beside = save_eagle3(tmp_path / "tiny-eagle3")
    assert heads_beside(source) == [beside]
    inside = save_eagle3(tmp_path / "tiny" / "head")
    assert heads_beside(source) == [beside, inside] or heads_beside(source) == [inside, beside]
    named = ["ngram", str(heads_beside(source)[0])]
    assert fitting_drafters(source) == named
    drafter = make_drafter(source, EngineConfig(drafter="auto", dtype="float32"))
    assert [type(part).__name__ for part in drafter.scorer.scorers] == ["Ngram", "Recurrent"]
    assert heads_beside(dataclasses.replace(source, name="owner/name")) == []


def test_a_p_eagle_head_is_found(tmp_path):
    source = load_source(str(save_model(tmp_path / "tiny")), "float32", "cpu")
    named = {"speculators_model_type": "peagle", "mask_token_id": 311, "num_hidden_layers": 2}
    head = save_eagle3(tmp_path / "tiny-peagle", **named)
    assert fitting_drafters(source) == ["ngram", str(head)]


def test_a_block_drafter_is_found(tmp_path):
    """Not one of other sizes, nor one whose mask the target does not know."""
    source, config = load_source(str(save_model(tmp_path / "tiny")), "float32", "cpu"), PUBLISHED["JetSpec"][0]
    mask = {"dflash_config": config["dflash_config"] | {"mask_token_id": 320}}
    for changes in ({"hidden_size": 64}, mask):
        save_block(tmp_path / "tiny-block", config | changes, block_tensors(config))
        assert fitting_drafters(source) == ["ngram"]
    head = save_block(tmp_path / "tiny-block", config, block_tensors(config))
    assert fitting_drafters(source) == ["ngram", str(head)]
    drafter = make_drafter(source, EngineConfig(drafter="auto", dtype="float32"))
    assert [type(part).__name__ for part in drafter.scorer.scorers] == ["Ngram", "BlockDrafter"]


@pytest.mark.parametrize("architecture", ["Llama", "Glm4Moe"])
def test_a_module_in_the_checkpoint_is_found(architecture, tmp_path, monkeypatch):
    """Dense or a mixture of experts; after a head beside it, and not where there are several or one of another kind."""
    monkeypatch.setitem(ARCHITECTURES, "Glm4Moe", GLM)
    folder, tensors = save_model(tmp_path / "tiny", architecture), module_tensors(tiny_model(architecture))
    add_module(folder, "DeepSeek-V3", tensors)
    source = load_source(str(folder), "float32", "cpu")
    assert fitting_drafters(source) == ["ngram", "mtp"]
    drafter = make_drafter(source, EngineConfig(drafter="auto", dtype="float32"))
    assert [type(part.head).__name__ for part in drafter.scorer.scorers[1:]] == ["MtpHead"]
    add_module(folder, "DeepSeek-V3", {}, **{"model.layers.4.eh_proj.weight": torch.ones(1)})
    assert fitting_drafters(source) == ["ngram"]
    other = add_module(save_model(tmp_path / "x"), "DeepSeek-V3", tensors | {"layer.odd": torch.ones(1)})
    assert fitting_drafters(load_source(str(other), "float32", "cpu")) == ["ngram"]
    head = save_eagle3(tmp_path / "x" / "head")
    assert fitting_drafters(load_source(str(other), "float32", "cpu")) == ["ngram", str(head)]


def test_a_module_of_several_layers_is_found(tmp_path):
    folder = save_model(tmp_path / "target", "NemotronH", num_nextn_predict_layers=1)
    _, tensors = nemotron_h_module(tiny_model("NemotronH"))
    write_module(folder, {}, {}, **tensors)
    assert fitting_drafters(load_source(str(folder), "float32", "cpu")) == ["ngram", "mtp"]
    write_module(folder, {}, {}, **{"mtp.layers.1.mixer.odd": torch.ones(1)})
    assert fitting_drafters(load_source(str(folder), "float32", "cpu")) == ["ngram"]


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{"], ids=["deep", "a list", "cut"])
def test_files_that_are_no_objects_are_no_drafters(text, tmp_path):
    for name in ("config.json", INDEX):
        (tmp_path / name).write_text(text)
    assert config_of(str(tmp_path)) is None and weight_files(str(tmp_path)) == []
