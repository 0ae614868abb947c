"""Engines of mixtures of experts say what transformers says, in every backend that runs on a CPU."""

import pytest
import specstep
from models import greedy, save_model, tiny_model
from sessions import PROMPTS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "backend"),
    [
        ("Qwen3Moe", "onnx"),  # weights [E, N, K]
        ("GptOss", "onnx"),  # weights [E, K, N], and biases
        ("Qwen3Moe", "inductor"),
        ("GptOss", "inductor"),
    ],
)
def test_engine_equals_transformers(architecture, backend, tmp_path):
    layers = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    model = save_model(tmp_path / "model", architecture, **layers)
    options = {"drafter": "ngram", "dtype": "float32", "max_batch": 2, "max_seq_len": 128, "prefill_chunk": 16}
    engine = specstep.load(specstep.build(str(model), tmp_path / "engine", backend=backend, **options))
    expected = [greedy(tiny_model(architecture, **layers), prompt, 40, [1]) for prompt in PROMPTS]
    assert [result.token_ids for result in engine.generate(PROMPTS, 40)] == expected
