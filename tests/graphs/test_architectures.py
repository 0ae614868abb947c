"""Every promised architecture: the step's output is transformers' greedy output, past every sliding window."""

import random
from pathlib import Path

import pytest
import specstep
import torch
import transformers
from gguf_cases import LONGROPE
from models import ALIKE, ARCHITECTURES, final_norm, greedy, save_model, tiny_model
from specstep.graphs import attention
from specstep.graphs.attention import chain_pass
from specstep.graphs.kept import UnsupportedModel, cache_layers, check_config
from specstep.graphs.target import CausalLM, body, capture_normed
from transformers import AutoModelForCausalLM

PROMPTS = [[5], [7, 8], [3, 9, 4] * 7, random.Random(0).choices(range(2, 300), k=45)]
NEW_TOKENS = 24


def reference(architecture: str) -> list[list[int]]:
    model = tiny_model(architecture)
    # transformers 5.24 bounds these models' time steps in a pass over several tokens, not in one over a single token.
    model.generation_config.use_cache = architecture not in ("NemotronH", "Zamba2")
    return [greedy(model, prompt, NEW_TOKENS, stop_ids=[1]) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in ARCHITECTURES]
)
def test_output_equals_transformers(architecture, tmp_path):
    folder = save_model(tmp_path / "target", architecture)
    expected = reference(architecture)
    perfect = {"drafter": str(folder), "nodes": 3}
    for choice in ({"drafter": "none"}, {"drafter": "ngram", "nodes": 6}, perfect):
        engine = specstep.eager(str(folder), dtype="float32", max_batch=2, max_seq_len=128, prefill_chunk=17, **choice)
        got = engine.generate(PROMPTS, NEW_TOKENS)
        assert [result.token_ids for result in got] == expected, choice
    for result in got:  # a first step has no tree
        right = result.stats["steps"] - 1
        assert result.stats["accepted"] == {"0": 1, "3": right}, "a perfect drafter is always right"


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    ["Lfm2", "Qwen3Next", "KimiLinear", "GraniteMoeHybrid", "Mamba2", "Mamba", "Jamba", "MiniMax", "Rwkv"],
)
def test_512_tokens_equal_transformers(architecture, tmp_path):
    """One of each kind of recurrent layer: an error that a state gathers would show."""
    folder = save_model(tmp_path / "target", architecture, max_position_embeddings=1024)
    model = tiny_model(architecture, max_position_embeddings=1024)
    expected = greedy(model, PROMPTS[2], 512, [])
    engine = specstep.eager(str(folder), dtype="float32", max_seq_len=600, drafter=str(folder), nodes=4)
    assert engine.generate(PROMPTS[2], 512, ignore_eos=True).token_ids == expected


@torch.no_grad()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hidden_states_up_to_that_behind_the_final_norm_are_features(architecture):
    """Index 3 is what the norm of three layers takes, 4 what it makes of it, whatever is asked beside it."""
    tokens = torch.tensor([[5, 6, 7, 40, 41, 42]])
    expected = body(tiny_model(architecture))(input_ids=tokens, use_cache=False).last_hidden_state
    for layers in ((4,), (0, 3, 4), (4, 4)):
        model = tiny_model(architecture)
        if 3 in layers and (not cache_layers(model) or architecture == "Gemma3nText"):
            with pytest.raises(UnsupportedModel, match="expected a drafter that reads the one behind the final norm"):
                CausalLM(model, layers)
            continue
        keys, values = (
            [torch.zeros(1, layer.heads, 16, size) for layer in cache_layers(model) for size in [layer[part]]]
            for part in (1, 2)
        )
        target = CausalLM(model, layers)
        state = {name: torch.zeros(1, *tensor.shape) for name, tensor in target.states.items()}
        where = chain_pass(torch.zeros(1, dtype=torch.int64), 6, 6, state=state)
        _, features = target(tokens, where, keys, values)
        parts = features.split(48, -1)
        # Against float64, transformers' own float32 is 2e-5 off here (Qwen3-Next).
        torch.testing.assert_close(parts[-1], expected, atol=1e-4, rtol=1e-4)
        if 3 in layers:
            torch.testing.assert_close(final_norm(model)(parts[1]), parts[2])
            assert (parts[1] - parts[2]).abs().max() > 0.01
        assert target.normed.state is None


def test_a_head_that_gets_another_hidden_state_is_refused(monkeypatch):
    model = tiny_model("Llama")
    monkeypatch.setattr(model, "get_output_embeddings", torch.nn.Tanh)
    with pytest.raises(UnsupportedModel, match="behind the final norm of LlamaForCausalLM cannot be captured"):
        capture_normed(model)


BY_LENGTH = {  # architecture, what changes its config, and the longest text up to which nothing changes
    "longrope": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}, 128),
    "dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                          "max_position_embeddings": 128}, 128),
    "chunks of 128 tokens": ("Llama4Text", {"attention_chunk_size": 128}, 128),
    "queries that grow behind 128": ("Llama4Text", {"floor_scale": 129}, 128),
}  # fmt: skip


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_what_changes_past_a_length_is_taken_up_to_it(kind, tmp_path):
    architecture, changes, most = BY_LENGTH[kind]
    folder = str(save_model(tmp_path / "model", architecture, **changes))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt, asked = list(range(20, 90)), {"do_sample": False, "max_new_tokens": 30, "eos_token_id": None}
    expected = model.generate(torch.tensor([prompt]), **asked)[0, 70:].tolist()
    engine = specstep.eager(folder, dtype="float32", max_seq_len=most, prefill_chunk=32, drafter="ngram")
    assert engine.generate(prompt, 30, ignore_eos=True).token_ids == expected
    with pytest.raises(specstep.BuildError, match=f"max_seq_len: expected at most the model's {most} positions"):
        specstep.eager(folder, dtype="float32", max_seq_len=most + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rates_of_lightning_attention_are_those_of_the_config_whatever_a_checkpoint_rounds_them_to(dtype):
    exact, model = tiny_model("MiniMax"), tiny_model("MiniMax").to(dtype)
    cache_layers(model)
    for layer, own in zip(model.model.layers[::2], exact.model.layers[::2], strict=True):
        assert layer.self_attn.slope_rate.dtype == dtype
        assert torch.equal(layer.self_attn.decay, (-own.self_attn.slope_rate).exp().flatten())
    model.model.layers[0].self_attn.slope_rate *= 1.1
    with pytest.raises(UnsupportedModel, match="slope_rate differs from the one its config gives"):
        cache_layers(model)


def test_frequencies_that_are_not_known_are_refused_by_name(tmp_path):
    model = tiny_model("Llama")
    model.config.rope_parameters["rope_type"] = "spiral"
    with pytest.raises(UnsupportedModel, match="rope_type 'spiral', whose angles may change with the sequence length"):
        check_config(model)


OTHERS = {
    "Falcon": ({"alibi": False}, "computes attention in code of its own"),
    "Bloom": ({}, "computes attention in code of its own"),
    "xLSTM": ({"num_heads": 4, "num_blocks": 2}, "its code uses `cache.rnn_state`; expected keys and values"),
    "Zamba": ({"num_hidden_layers": 6, "attention_head_dim": 24, "attn_layer_period": 2, "attn_layer_offset": 1,
               "intermediate_size": 64}, "its layers scan 2 heads in as many calls; expected one call a layer"),
    "RecurrentGemma": ({"lru_width": 48, "num_key_value_heads": 1}, "has layers of type .'linear_attention'."),
}  # fmt: skip


@pytest.mark.parametrize("architecture", OTHERS)
def test_unsupported_models_are_refused_by_name(architecture, tmp_path):
    changes, message = OTHERS[architecture]
    small = {"vocab_size": 320, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{architecture}Config")(**small | changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(specstep.BuildError, match=f"model: {architecture}ForCausalLM .*({message})") as refusal:
        specstep.eager(str(tmp_path / "model"), dtype="float32", max_seq_len=64)
    assert "\n" not in str(refusal.value)


def test_the_table_of_models_holds_no_defect():
    """`python bench/model_table.py` tried every class of transformers."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    rows = [line.split(" | ", 2) for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 180
    assert all(cell.startswith(("works", "refused: ", "not tried: ")) for _, _, cell in rows)
    cells = {name: cell for _, name, cell in rows}
    assert all(cells[type(tiny_model(name)).__name__].startswith("works") for name in ARCHITECTURES)


def test_whatever_a_traced_pass_raises_is_one_line(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("first line\nsecond line")

    folder = save_model(tmp_path / "model")
    monkeypatch.setattr(attention.Pass, "attention", broken)
    with pytest.raises(specstep.BuildError, match="LlamaForCausalLM cannot be traced: RuntimeError: first") as refusal:
        specstep.eager(str(folder), dtype="float32", max_seq_len=64)
    assert "second line" not in str(refusal.value)


def test_a_mask_of_the_models_own_is_refused(tmp_path, monkeypatch):
    """Nothing that a model adds to the scores may be dropped in silence."""
    folder = save_model(tmp_path / "model")
    biased = torch.zeros(1, 1, 1, 1)
    monkeypatch.setattr("transformers.models.llama.modeling_llama.create_causal_mask", lambda **_: biased)
    with pytest.raises(specstep.BuildError, match="adds a mask of its own"):
        specstep.eager(str(folder), dtype="float32", max_seq_len=64)


def test_unfaithful_trace_is_refused_by_name(tmp_path, monkeypatch):
    """If our attention ignored the window, the build would notice."""
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
