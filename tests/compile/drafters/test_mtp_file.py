"""Modules for multi-token prediction in checkpoints: what is read, and what is refused by name."""

import pytest
import specstep
import torch
from models import greedy, save_model, tiny_model
from mtp_modules import add_mimo_v2_modules, add_module, mimo_v2_module, module_tensors, mtp_chain, save_speculator
from plain_eagle3 import chains

pytestmark = pytest.mark.usefixtures("as_published")

OPTIONS = {"drafter": "mtp", "dtype": "float32", "max_seq_len": 96, "tree": "chain", "nodes": 3}


@torch.no_grad()
def test_copies_of_the_embeddings_and_the_head_are_the_targets_own(tmp_path):
    """As DeepSeek writes them. Others are refused."""
    model, drafted = tiny_model("Llama"), []
    tables = {"embed_tokens": model.get_input_embeddings(), "shared_head.head": model.get_output_embeddings()}
    copies = {f"model.layers.3.{name}.weight": table.weight.detach().clone() for name, table in tables.items()}
    for more in ({}, copies):
        folder = save_model(tmp_path / str(len(more)))
        engine = specstep.eager(str(add_module(folder, "DeepSeek-V3", module_tensors(model), **more)), **OPTIONS)
        drafted.append(chains(engine, [None] * 4))
    assert drafted[0] == drafted[1]
    for name in copies:
        other = add_module(save_model(tmp_path / "x"), "DeepSeek-V3", module_tensors(model), **{name: copies[name] + 1})
        with pytest.raises(specstep.BuildError, match=r"(embed_tokens|lm_head).weight: expected the target's own, got"):
            specstep.eager(str(other), **OPTIONS)


@torch.no_grad()
def test_a_dense_module_of_a_mixture(tmp_path):
    """Its layer is like the target's first, not like its last."""
    model = tiny_model("DeepseekV3")
    folder = save_model(tmp_path / "target", "DeepseekV3")
    engine = specstep.eager(str(add_module(folder, "DeepSeek-V3", module_tensors(model, layer=0))), **OPTIONS)
    assert engine.generate([5, 6, 7], 10, ignore_eos=True).stats["steps"] > 1


@pytest.mark.parametrize("architecture", ["Qwen3Next", "Qwen3_5Text"])
def test_a_module_of_a_hybrid_target(architecture, tmp_path):
    """Its layer is like the one that attends, which is the target's only one with keys and values."""
    model = tiny_model(architecture)
    folder = add_module(save_model(tmp_path / "target", architecture), "Qwen3-Next", module_tensors(model, layer=1))
    engine = specstep.eager(str(folder), **OPTIONS)
    for prompt in ([5, 6, 7], [3, 9, 4] * 9):
        result = engine.generate(prompt, 20, ignore_eos=True)
        assert result.token_ids == greedy(model, prompt, 20)
        assert result.stats["steps"] > 1


@pytest.mark.parametrize(
    ("layout", "damage", "message"),
    [
        ("DeepSeek-V3", lambda t: t.pop("proj.weight"), "expected a module for multi-token prediction in .*, got none"),
        ("DeepSeek-V3", lambda t: t.pop("layer.mlp.up_proj.weight"), "missing layer.mlp.up_proj.weight"),
        ("MiMo", lambda t: t.update({"layer.odd": torch.ones(1)}), "unexpected layer.odd"),
        ("Qwen3-Next", lambda t: t.update({"proj.weight": torch.ones(48, 48)}), r"proj.weight: expected \[48, 96\]"),
        ("MiMo", lambda t: t.update({"enorm.weight": torch.ones(9)}), r"enorm.weight: expected \[48\], got \[9\]"),
    ],
)
def test_modules_that_do_not_fit_are_refused(layout, damage, message, tmp_path):
    tensors = module_tensors(tiny_model("Llama"))
    damage(tensors)
    folder = add_module(save_model(tmp_path / "target"), layout, tensors)
    with pytest.raises(specstep.BuildError, match=message):
        specstep.eager(str(folder), **OPTIONS)


@pytest.mark.parametrize(
    ("layout", "further"),
    [
        ("MiMo", "model.mtp_layers.1.input_proj.weight"),
        ("Qwen3-Next", "mtp.layers.1.mlp.up_proj.weight"),
        ("Ernie", "model.mtp_block.1.mlp.up_proj.weight"),
    ],
)
def test_several_modules_of_which_one_alone_is_known_are_refused(layout, further, tmp_path):
    tensors = module_tensors(tiny_model("Llama"))
    folder = add_module(save_model(tmp_path / "target"), layout, tensors, **{further: torch.ones(1)})
    with pytest.raises(specstep.BuildError, match=f"expected one module, got another, {further}"):
        specstep.eager(str(folder), **OPTIONS)


def test_modules_of_targets_that_are_not_run_are_refused(tmp_path):
    """LongCat's names, and MiMo-V2's for another target, whose layers are not like its."""
    folder = save_model(tmp_path / "longcat")
    names = ("enorm.m.weight", "hnorm.m.weight", "eh_proj.weight", "transformer_layer.mlp.up_proj.weight")
    add_module(folder, "MiMo", {}, **{f"model.mtp.layers.0.{name}": torch.ones(1) for name in names})
    with pytest.raises(specstep.BuildError, match=r"expected a module for multi-token prediction in .*, got none"):
        specstep.eager(str(folder), **OPTIONS)
    folder = add_mimo_v2_modules(save_model(tmp_path / "llama"), [mimo_v2_module()])
    with pytest.raises(specstep.BuildError, match="expected a target whose config has layer_types, got llama"):
        specstep.eager(str(folder), **OPTIONS)


def test_a_target_without_a_module_is_refused(model_folder):
    with pytest.raises(specstep.BuildError, match=r"mtp: expected a module .*, as DeepSeek-V3, GLM-4.5, MiMo, .* none"):
        specstep.eager(str(model_folder), **OPTIONS)


@torch.no_grad()
def test_a_module_in_a_directory_of_its_own(tmp_path):
    """As speculators writes it: MiMo's names, the embedding ahead of the hidden state."""
    model = tiny_model("Llama", rms_norm_eps=1e-5)
    tensors, target = module_tensors(model), save_model(tmp_path / "target", rms_norm_eps=1e-5)
    head = save_speculator(tmp_path / "head", tensors, num_nextn_predict_layers=1)
    found = chains(specstep.eager(str(target), **OPTIONS | {"drafter": str(head)}), [None] * 4)
    assert [got for _, got in found] == [mtp_chain(tensors, model, tokens, 3, "DeepSeek-V3") for tokens, _ in found]
    assert [got for _, got in found] != [mtp_chain(tensors, model, tokens, 3, "MiMo") for tokens, _ in found]


@pytest.mark.parametrize(
    ("damage", "config", "message"),
    [
        (lambda t: None, {"num_nextn_predict_layers": 3}, "num_nextn_predict_layers: expected 1, got 3"),
        (lambda t: t.pop("hnorm.weight"), {}, "tensors do not fit: missing hnorm.weight"),
        (lambda t: t.update({"layer.odd": torch.ones(1)}), {}, "unexpected layer.odd"),
    ],
)
def test_modules_apart_that_do_not_fit_are_refused(damage, config, message, model_folder, tmp_path):
    tensors = module_tensors(tiny_model("Llama"))
    damage(tensors)
    head = save_speculator(tmp_path / "head", tensors, **config)
    with pytest.raises(specstep.BuildError, match=message):
        specstep.eager(str(model_folder), **OPTIONS | {"drafter": str(head)})


@torch.no_grad()
def test_copies_in_another_dtype_are_the_targets_own(tmp_path):
    model = tiny_model("Llama")
    folder, table = save_model(tmp_path / "target"), model.get_input_embeddings().weight.detach().bfloat16()
    copy = {"model.layers.3.embed_tokens.weight": table.float()}
    add_module(folder, "DeepSeek-V3", module_tensors(model), **copy)
    options = OPTIONS | {"dtype": "bfloat16"}
    assert specstep.eager(str(folder), **options).generate([5, 6, 7], 5, ignore_eos=True).stats["steps"] > 0
