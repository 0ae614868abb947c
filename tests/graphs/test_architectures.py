"""Every promised architecture: the step's output is transformers' greedy output, past every sliding window."""

import random

import pytest
import specstep
from models import ARCHITECTURES, greedy, save_model, tiny_model

PROMPTS = [[5], [7, 8], [3, 9, 4] * 7, random.Random(0).choices(range(2, 300), k=45)]
NEW_TOKENS = 40


def reference(architecture: str) -> list[list[int]]:
    model = tiny_model(architecture)
    return [greedy(model, prompt, NEW_TOKENS, stop_ids=[1]) for prompt in PROMPTS]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_output_equals_transformers(architecture, tmp_path):
    folder = save_model(tmp_path / "target", architecture)
    drafter = save_model(tmp_path / "drafter", "Llama", seed=1, num_hidden_layers=2)
    expected = reference(architecture)
    drafters = [{"drafter": "none"}, {"drafter": "ngram", "nodes": 6}]
    drafters += [{"drafter": str(path), "nodes": 3} for path in (drafter, folder)]  # a poor drafter and a perfect one
    for choice in drafters:
        engine = specstep.eager(str(folder), dtype="float32", max_batch=2, max_seq_len=128, prefill_chunk=17, **choice)
        got = engine.generate(PROMPTS, NEW_TOKENS)
        assert [result.token_ids for result in got] == expected, choice
    assert all(set(result.stats["accepted"]) == {"3"} for result in got), "a perfect drafter is always right"


@pytest.mark.parametrize("changes", [{"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}])
def test_length_dependent_rope_is_refused_by_name(changes, tmp_path):
    folder = save_model(tmp_path / "model", "Llama", **changes)
    with pytest.raises(specstep.BuildError, match="rope_type 'dynamic'"):
        specstep.eager(str(folder), dtype="float32")


def test_unfaithful_trace_is_refused_by_name(tmp_path, monkeypatch):
    """If our attention ignored the window, the build would notice."""
    from specstep.graphs import attention

    folder = save_model(tmp_path / "model", "Mistral")
    whole = attention.Pass.attention
    monkeypatch.setattr(
        attention.Pass, "attention", lambda self, q, k, v, scale, _, *rest: whole(self, q, k, v, scale, 0, *rest)
    )
    with pytest.raises(specstep.BuildError, match="MistralForCausalLM is not traced faithfully"):
        specstep.build(str(folder), tmp_path / "engine", dtype="float32", max_seq_len=128)
    assert not (tmp_path / "engine").exists()


def test_positions_past_the_table_are_refused(tmp_path):
    folder = save_model(tmp_path / "model", "GPT2")
    with pytest.raises(specstep.BuildError, match="max_seq_len: expected at most the model's 512"):
        specstep.eager(str(folder), dtype="float32", max_seq_len=513)


def test_whole_position_table_is_usable(tmp_path):
    """Draft nodes past the last learned position must not read past the table."""
    folder = save_model(tmp_path / "model", "GPT2", n_positions=40)
    engine = specstep.eager(str(folder), dtype="float32", max_seq_len=40, drafter="ngram", nodes=8)
    result = engine.generate([3, 4, 5] * 4, ignore_eos=True)
    assert result.finish_reason == "length" and len(result.token_ids) == 28
    model = tiny_model("GPT2", n_positions=40)
    assert result.token_ids == greedy(model, [3, 4, 5] * 4, 28)
