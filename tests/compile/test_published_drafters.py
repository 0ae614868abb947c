"""Published drafters of every family in compiled engines: each integer as in torch, all text as transformers'."""

import pytest
import specstep
from models import greedy, save_model, tiny_model
from mtp_modules import add_module, module_tensors
from sessions import PROMPTS, agree

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
