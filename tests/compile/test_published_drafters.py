"""Published drafters of every family in compiled engines: each integer as in torch, all text as transformers'."""

import pytest
import specstep
import torch
from assistants import CLUSTERS, save_assistant, save_target
from block_drafters import PUBLISHED, block_tensors, save_block
from models import greedy, save_model, tiny_model
from mtp_modules import add_module, module_tensors
from pard2_model import save_pard2
from sessions import PROMPTS, agree
from transformers import AutoModelForCausalLM

OPTIONS = {"dtype": "float32", "max_batch": 2, "max_seq_len": 192, "prefill_chunk": 16}
TREE = {"tree": "dynamic", "depth": 3, "top_k": 2, "nodes": 6}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inductor", "onnx"])
def test_engine_equals_torch_and_transformers(backend, published_heads, tmp_path):
    """One engine with all of them: what the target computes for one, and caches, do not get in the way of another."""
    folder = add_module(save_model(tmp_path / "target"), "DeepSeek-V3", module_tensors(tiny_model("Llama")))
    options = OPTIONS | TREE | {"drafter": f"{published_heads},mtp"}
    engine = specstep.load(specstep.build(str(folder), tmp_path / "engine", backend=backend, **options))
    agree([engine, specstep.eager(str(folder), **options)])
    expected = [greedy(tiny_model("Llama"), prompt, 40, [1]) for prompt in PROMPTS]
    assert [result.token_ids for result in engine.generate(PROMPTS, 40)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("place", range(6))
def test_each_alone_under_torch_compile(place, published_heads, tmp_path):
    folder = add_module(save_model(tmp_path / "target"), "DeepSeek-V3", module_tensors(tiny_model("Llama")))
    options = OPTIONS | TREE | {"drafter": f"{published_heads},mtp".split(",")[place]}
    agree([make(str(folder), **options) for make in (specstep.eager, specstep.jit)])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inductor", "onnx"])
def test_further_ones_equal_torch_and_transformers(backend, tmp_path):
    """PARD-2, which reads the target's hidden states with each token, and Domino, which carries a path's memory."""
    folder = save_model(tmp_path / "target")
    torch.manual_seed(3)
    save_pard2(save_model(tmp_path / "pard2", seed=1, num_hidden_layers=2, hidden_size=32), torch.randn(32, 96))
    config, tables, _ = PUBLISHED["Domino"]
    save_block(tmp_path / "domino", config | {"feature_layers": [1, 3]}, block_tensors(config, tables))
    options = OPTIONS | TREE | {"drafter": f"{tmp_path / 'pard2'},{tmp_path / 'domino'},ngram"}
    engine = specstep.load(specstep.build(str(folder), tmp_path / "engine", backend=backend, **options))
    agree([engine, specstep.eager(str(folder), **options)])
    expected = [greedy(tiny_model("Llama"), prompt, 40, [1]) for prompt in PROMPTS]
    assert [result.token_ids for result in engine.generate(PROMPTS, 40)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inductor", "onnx"])
def test_an_assistant_of_clusters_equals_torch_and_transformers(backend, tmp_path):
    folder, assistant = save_target(tmp_path / "target"), save_assistant(tmp_path / "assistant", **CLUSTERS)
    options = OPTIONS | TREE | {"drafter": f"{assistant},ngram"}
    engine = specstep.load(specstep.build(str(folder), tmp_path / "engine", backend=backend, **options))
    agree([engine, specstep.eager(str(folder), **options)])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = [greedy(model, prompt, 40, [1]) for prompt in PROMPTS]
    assert [result.token_ids for result in engine.generate(PROMPTS, 40)] == expected


@pytest.mark.slow
def test_a_module_that_uses_the_targets_head_is_lowered_for_a_gpu_that_is_not_there(tmp_path):
    """The head keeps what it was given, which the module gave it last."""
    pytest.importorskip("triton")
    folder = add_module(save_model(tmp_path / "target"), "DeepSeek-V3", module_tensors(tiny_model("Llama")))
    options = TREE | {"drafter": "mtp", "max_seq_len": 192, "device": "cuda", "compute_capability": ("9.0",)}
    specstep.build(str(folder), tmp_path / "engine", **options)
    assert (tmp_path / "engine" / "step.pt2").is_file()
