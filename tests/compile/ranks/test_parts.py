"""Engines whose rowwise layers are sums of parts: transformers' text, whatever is drafted and computed beside it."""

import pytest
import specstep
import torch
from models import greedy, save_model, tiny_model
from specstep.commands.describe import describe
from specstep.compile.ranks.parts import cut_rows
from specstep.graphs.parts import ExpertsOfParts, LinearOfParts
from specstep.runtime.engine_file import read_manifest
from torch import nn

PROMPTS = [[5], [7, 8], [3, 9, 4] * 7]
CUT = {  # and how many parts
    "Llama": 2, "Qwen2": 3, "Qwen3": 4, "Gemma3Text": 2, "Phi3": 2, "GPTNeoX": 4, "Qwen3Moe": 2, "DeepseekV3": 2
}  # fmt: skip


@pytest.mark.parametrize("architecture", CUT)
def test_output_equals_transformers(architecture, tmp_path):
    changes = {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 96} if CUT[architecture] == 3 else {}
    folder, model = save_model(tmp_path / "model", architecture, **changes), tiny_model(architecture, **changes)
    options = {"dtype": "float32", "max_batch": 2, "max_seq_len": 96, "sum_parts": CUT[architecture]}
    got = specstep.eager(str(folder), drafter="ngram", **options).generate(PROMPTS, 24)
    assert [result.token_ids for result in got] == [greedy(model, prompt, 24, stop_ids=[1]) for prompt in PROMPTS]


def test_a_draft_model_of_parts_changes_no_text(drafter_folder, tmp_path):
    folder, model = save_model(tmp_path / "model", vocab_size=320), tiny_model("Llama", vocab_size=320)
    options = {"dtype": "float32", "max_batch": 2, "max_seq_len": 96, "sum_parts": 2, "draft_ranks": 2}
    got = specstep.eager(str(folder), drafter=str(drafter_folder), **options).generate(PROMPTS, 24)
    assert [result.token_ids for result in got] == [greedy(model, prompt, 24, stop_ids=[1]) for prompt in PROMPTS]


def test_every_layer_that_the_plan_names_is_cut():
    model = tiny_model("Qwen3Moe", mlp_only_layers=[0])
    cut_rows(model, 2, "sum_parts")
    kinds = {name: type(module) for name, module in model.named_modules()}
    for layer in range(3):
        assert kinds[f"model.layers.{layer}.self_attn.o_proj"] is LinearOfParts
        assert kinds[f"model.layers.{layer}.self_attn.q_proj"] is nn.Linear
    assert kinds["model.layers.0.mlp.down_proj"] is LinearOfParts
    assert kinds["model.layers.1.mlp.experts"] is kinds["model.layers.2.mlp.experts"] is ExpertsOfParts
    first, second = model.model.layers[1].mlp.experts.parts
    assert first.config is second.config is model.config
    assert first._forward_pre_hooks is not second._forward_pre_hooks


@torch.no_grad()
def test_parts_are_views_of_the_whole_and_a_bias_is_added_once():
    model = tiny_model("GPTNeoX")
    whole = model.gpt_neox.layers[1].mlp.dense_4h_to_h
    torch.nn.init.normal_(whole.bias)
    cut_rows(model, 4, "sum_parts")
    cut = model.gpt_neox.layers[1].mlp.dense_4h_to_h
    assert {weight.untyped_storage().data_ptr() for weight in cut.weights} == {whole.weight.data_ptr()}
    x = torch.randn(5, 64)
    torch.testing.assert_close(cut(x), whole(x), atol=1e-5, rtol=1e-5)
    expected = sum(x.double()[:, at : at + 16] @ whole.weight.double()[:, at : at + 16].T for at in range(0, 64, 16))
    torch.testing.assert_close(cut.double()(x.double()), expected + whole.bias.double(), atol=1e-12, rtol=1e-12)


@pytest.fixture(scope="module")
def int4_folder(once):
    """An engine of two parts, of four bits each, of two rows."""

    def make(folder):
        changes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_hidden_layers": 1}
        model = save_model(folder / "model", "Llama", **changes)
        options = {"drafter": "ngram", "nodes": 6, "max_batch": 2, "max_seq_len": 96, "weights": "int4"}
        specstep.build(str(model), folder / "engine", sum_parts=2, **options)

    return once("int4_parts", make) / "engine"


@pytest.mark.slow
def test_no_draft_and_no_batch_changes_a_text_of_quantised_parts(int4_folder):
    manifest = read_manifest(int4_folder)
    assert "\nparts       rowwise layers are sums of 2\n" in describe(manifest)
    assert manifest.spec.config["sum_parts"] == 2 and manifest.about["drafts_may_change_text"] == []
    texts = []
    for nodes in ("all", 0):
        with specstep.load(int4_folder, nodes=nodes) as engine:
            together = engine.generate(PROMPTS, 40, ignore_eos=True)
            alone = [engine.generate(prompt, 40, ignore_eos=True) for prompt in PROMPTS]
        texts += [[result.token_ids for result in together], [result.token_ids for result in alone]]
    assert texts[0] == texts[1] == texts[2] == texts[3]


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("GPT2", {"sum_parts": 2}, "sum_parts: expected a model that transformers can cut.*GPT2LMHeadModel"),
        (
            "Llama",
            {"sum_parts": 5},
            "sum_parts: expected a divisor of the 48 inputs of LlamaForCausalLM's model.layers",
        ),
        ("Llama", {"sum_parts": 0}, "sum_parts: expected 1 to 64, got 0"),
        ("Llama", {"sum_parts": 2, "backend": "onnx"}, "sum_parts: expected 1 for backend onnx, got 2; inductor takes"),
        ("Llama", {"sum_parts": 2, "weights": "int8"}, "expected parts of a multiple of 32 inputs.*int8, got 24"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(architecture, options, message, tmp_path):
    folder = save_model(tmp_path / "model", architecture)
    with pytest.raises(specstep.BuildError, match=message):
        specstep.build(str(folder), tmp_path / "engine", drafter="none", max_seq_len=64, **options)
    assert not (tmp_path / "engine").exists()


def test_parts_on_a_gpu_are_refused():
    with pytest.raises(specstep.BuildError, match="sum_parts: expected 1 with device cuda, got 2"):
        specstep.build("none", "none", device="cuda", compute_capability=("9.0",), sum_parts=2)
