"""On an NVIDIA GPU: engines replayed as CUDA graphs say what transformers says. Run by `make gpu-check`."""

import pytest
import specstep
import torch
from models import greedy, logit_gap, save_eagle3, tiny_model
from specstep.runtime.tensorrt.library import LibraryError, load_library

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

PROMPTS = [[5], [40, 41, 42] * 9, list(range(30, 83)), [9, 9, 9, 9], [7, 8]]
CHOICES = {
    "none": {"drafter": "none"},
    "ngram": {"drafter": "ngram"},
    "model": {"drafter": "{drafter}", "nodes": 3},
    "chain": {"drafter": "{head}", "tree": "chain", "nodes": 4},
    "static": {"drafter": "{head}", "tree": "static", "nodes": 9, "depth": 3, "top_k": 3},
    "dynamic": {"drafter": "{head}", "tree": "dynamic", "nodes": 11, "depth": 4, "top_k": 3},
}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("choice", CHOICES)
def test_engine_equals_transformers(choice, batch, model_folder, drafter_folder, tmp_path):
    head = save_eagle3(tmp_path / "head")
    options = dict(CHOICES[choice])
    options["drafter"] = options["drafter"].format(drafter=drafter_folder, head=head)
    folder = specstep.build(
        str(model_folder),
        tmp_path / "engine",
        device="cuda",
        dtype="float32",
        max_batch=batch,
        max_seq_len=192,
        **options,
    )
    engine, model = specstep.load(folder), tiny_model("Llama")
    expected = [greedy(model, prompt, 60, [1]) for prompt in PROMPTS]
    for _ in range(2):  # the second time all steps are replays
        assert [result.token_ids for result in engine.generate(PROMPTS, 60)] == expected


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("choice", ["ngram", "dynamic"])
@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_tensorrt_equals_transformers(backend, choice, batch, model_folder, tmp_path):
    try:
        load_library(backend)
    except LibraryError as error:
        pytest.skip(str(error))
    options = CHOICES[choice] | {"dtype": "float32", "max_batch": batch, "max_seq_len": 192, "prefill_chunk": 16}
    options["drafter"] = options["drafter"].format(head=save_eagle3(tmp_path / "head"))
    engine = specstep.load(specstep.build(str(model_folder), tmp_path / "engine", backend=backend, **options))
    expected = [greedy(tiny_model("Llama"), prompt, 60, [1]) for prompt in PROMPTS]
    for _ in range(2):  # the second time all steps are replays
        assert [result.token_ids for result in engine.generate(PROMPTS, 60)] == expected


@pytest.mark.parametrize(("dtype", "most"), [("float16", 0.05), ("bfloat16", 0.4)])
def test_low_precision_is_greedy_within_rounding(dtype, most, model_folder, tmp_path):
    folder = specstep.build(str(model_folder), tmp_path / "engine", device="cuda", dtype=dtype, max_seq_len=192)
    engine, model = specstep.load(folder), tiny_model("Llama")
    for prompt in PROMPTS:
        tokens = engine.generate(prompt, 40, ignore_eos=True).token_ids
        assert len(tokens) == 40 and logit_gap(model, prompt, tokens) <= most
    assert logit_gap(model, prompt, [(token + 1) % 320 for token in tokens]) > most
