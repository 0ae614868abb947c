"""Nothing of a GGUF file is lost without a word."""

import pytest
import torch
from gguf_case import case_model, interleaved, metadata, named_tensors, save_case
from gguf_cases import CASES
from gguf_files import write_gguf
from specstep.compile.gguf.load import load_gguf
from specstep.compile.source import load_source
from specstep.errors import BuildError

LLAMA = CASES["llama"]
TOKENS = torch.randint(2, 300, (1, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    return case_model(LLAMA)


def file_with(path, model, keys=None, tensors=None, architecture="llama", **options):
    """The tiny Llama's file with other keys and tensors; None leaves one out."""
    kept = {key: value for key, value in (metadata(LLAMA, model) | (keys or {})).items() if value is not None}
    held = {name: interleaved(model, name, tensor) for name, tensor in named_tensors(LLAMA, model).items()}
    changed = {name: tensor for name, tensor in (held | (tensors or {})).items() if tensor is not None}
    return write_gguf(path, architecture, kept, changed, **options)


def refusal(path):
    with pytest.raises(BuildError) as error:
        load_source(str(path), "float32", "cpu")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_llama_3_factors_reach_the_angles(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 20000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    case = LLAMA._replace(changes={"rope_parameters": rope, "head_dim": 16}, keys={"attention.key_length": 16})
    model = case_model(case)
    plain = case_model(case._replace(changes={"rope_parameters": {"rope_theta": 20000.0}, "head_dim": 16}))
    factors = plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq
    assert len(set(factors.round(decimals=3).tolist())) == 3
    held = {name: interleaved(model, name, tensor) for name, tensor in named_tensors(case, model).items()}
    path = write_gguf(tmp_path / "a.gguf", "llama", metadata(case, model), held | {"rope_freqs.weight": factors})
    loaded = load_gguf(path, torch.float32)[0].eval()
    with torch.no_grad():
        assert torch.allclose(loaded(TOKENS).logits, model(TOKENS).logits, atol=1e-3)
        assert not torch.allclose(loaded(TOKENS).logits, plain(TOKENS).logits, atol=1e-1)
    held["rope_freqs.weight"] = factors[:-1]
    path = write_gguf(tmp_path / "b.gguf", "llama", metadata(case, model), held)
    assert "rope_freqs.weight: expected 8 factors for model.rotary_emb.inv_freq, got (7,)" in refusal(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention.something": 3}, "expected keys whose meaning is known, got llama.attention.something = 3"),
        ({"attention.causal": False}, "attention.causal: expected true, got false"),
        ({"rope.scaling.type": "dynamic"}, "rope.scaling.type: expected none, linear or yarn, got dynamic"),
        ({"rope.scaling.attn_factor": 1.5}, "rope.scaling.attn_factor: expected 1 with none, got 1.5"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_attn_factor": 1.0},
            "yarn_attn_factor: expected another number than 1, which may be the attention_factor or the attn_factor",
        ),
        ({"rope.dimension_count": 6}, "rope.dimension_count: expected the head size 12 for llama, got 6"),
        ({"rope.scaling.finetuned": False}, "rope.scaling.finetuned: expected true, got false"),
        ({"rope.dimension_sections": [2, 4, 0, 0]}, "got llama.rope.dimension_sections = [2, 4, 0, 0]"),
        (
            {"attention.layer_norm_rms_epsilon": None},
            "expected the key llama.attention.layer_norm_rms_epsilon, got none",
        ),
        ({"attention.head_count": [4, 4, 2]}, "attention.head_count: expected one value for all layers, got [4, 4, 2]"),
    ],
)
def test_a_key_that_is_not_understood_is_named(tmp_path, model, keys, message):
    assert message in refusal(file_with(tmp_path / "a.gguf", model, keys))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.0.attn_q.scale": torch.ones(1)}, "expected tensors that a llama has here, got blk.0.attn_q.scale"),
        ({"rope_factors_short.weight": torch.ones(6)},
         "expected all weights, got none for rope_factors_long.weight"),
        ({"blk.1.ffn_up.weight": None}, "expected all weights, got none for blk.1.ffn_up.weight"),
        ({"token_embd.weight": None}, "expected all weights, got none for token_embd.weight"),
        ({"blk.0.ffn_up.weight": torch.ones(60, 48)},
         "blk.0.ffn_up.weight: expected shape (64, 48) for model.layers.0.mlp.up_proj.weight, got (60, 48)"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_not_taken_or_missing_is_named(tmp_path, model, tensors, message):
    assert message in refusal(file_with(tmp_path / "a.gguf", model, tensors=tensors))


def test_an_architecture_that_is_not_known_is_named_with_those_that_are(tmp_path, model):
    said = refusal(file_with(tmp_path / "a.gguf", model, architecture="rwkv7"))
    assert "general.architecture: expected one of cohere2, command-r," in said and said.endswith("got rwkv7")


def test_keys_that_are_known_to_be_harmless_are_taken(tmp_path, model):
    whole = {"general.license": "mit", "somebody.quantized_by": "me", "quantize.imatrix.file": "x",
             "tokenizer.ggml.seperator_token_id": 3, "llama.vocab_size": 320,
             "tokenizer.ggml.scores": [0.0] * 320}  # fmt: skip
    assert load_source(str(file_with(tmp_path / "a.gguf", model, whole=whole)), "float32", "cpu").stop_ids == (1,)


def test_a_model_of_images_has_its_rows_in_another_order(tmp_path):
    """Files of GLM-4.1V say `glm4`, and are rotated as halves where those of GLM-4 are as pairs."""
    case = CASES["glm4"]
    model = case_model(case)
    path = save_case(tmp_path / "a.gguf", case, model, whole={"glm4.rope.dimension_sections": [2, 2, 2, 0]})
    assert "rope.dimension_sections: expected none for glm4" in refusal(path)
    path = save_case(tmp_path / "b.gguf", case, model, whole={"glm4.rope.dimension_sections": [0, 0, 0, 0]})
    assert load_gguf(path, torch.float32)


def test_granite_of_the_hybrid_s_converter_is_taken(tmp_path):
    case = CASES["granite"]
    whole = {"granite.ssm.conv_kernel": 4, "granite.expert_count": 0, "granite.expert_used_count": 0,
             "granite.expert_shared_feed_forward_length": 64, "granite.deepstack_mapping": [0, -1]}  # fmt: skip
    assert load_gguf(save_case(tmp_path / "a.gguf", case, case_model(case), whole=whole), torch.float32)


def test_a_factor_that_transformers_ignores_is_ignored(tmp_path):
    """DeepSeek-R1-0528-Qwen3-8B's config has yarn with an `attn_factor`, which converters write in place of an
    `attention_factor`."""
    case = CASES["qwen2 yarn"]
    rope = {name: value for name, value in case.changes["rope_parameters"].items() if name != "attention_factor"}
    keys = case.keys | {"rope.scaling.yarn_attn_factor": 0.8782488562869419}
    model = case_model(case._replace(changes={"rope_parameters": rope}))
    path = save_case(tmp_path / "a.gguf", case._replace(changes={"rope_parameters": rope}, keys=keys), model)
    with torch.no_grad():
        assert torch.allclose(load_gguf(path, torch.float32)[0].eval()(TOKENS).logits, model(TOKENS).logits, atol=1e-3)


def test_gemma_3n_caps_its_logits_where_a_file_does_not_say_so(tmp_path):
    case = CASES["gemma3n"]
    keys = {key: value for key, value in case.keys.items() if key != "final_logit_softcapping"}
    model = case_model(case)
    assert len(keys) < len(case.keys) and model.config.final_logit_softcapping == 30
    path = save_case(tmp_path / "a.gguf", case._replace(keys=keys), model)
    with torch.no_grad():
        assert torch.allclose(load_gguf(path, torch.float32)[0].eval()(TOKENS).logits, model(TOKENS).logits, atol=1e-3)


def test_experts_may_lie_in_one_tensor(tmp_path):
    case = CASES["qwen3moe"]

    def own(model, name, tensor):
        fused = name.endswith("experts.gate_up_proj")
        return {f"blk.{name.split('.')[2]}.ffn_gate_up_exps.weight": tensor} if fused else {}

    model = case_model(case)
    path = save_case(tmp_path / "a.gguf", case._replace(own=own), model)
    with torch.no_grad():
        assert torch.allclose(load_gguf(path, torch.float32)[0].eval()(TOKENS).logits, model(TOKENS).logits, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("granitehybrid", "rope.dimension_count", 6, "rope.dimension_count: expected the head size 12"),  # Bamba
        ("granitehybrid", "logit_scale", None, "expected the key granitehybrid.logit_scale, got none"),
        ("granitehybrid", "ssm.time_step_rank", 0, "ssm.time_step_rank: expected at least 1, got 0"),
        ("granitehybrid", "ssm.time_step_rank", 11, "got ValueError: mamba_n_heads must divide"),
        ("qwen3next", "ssm.group_count", None, "expected the key qwen3next.ssm.group_count, got none"),
        (
            "nemotron_h",
            "attention.layer_norm_epsilon",
            1e-5,
            "layer_norm_epsilon: expected one value, got [9.99",
        ),
        ("qwen35", "ssm.group_count", 3, "expected what makes model.layers.0.linear_attn."),
        ("mamba", "ssm.state_size", None, "expected the key mamba.ssm.state_size, got none"),
        ("mamba", "ssm.inner_size", 100, "ssm.inner_size: expected a multiple of 48, got 100"),
        ("mamba", "attention.head_count", 4, "attention.head_count: expected 0 or none, got 4"),
        ("mamba", "attention.layer_norm_rms_epsilon", None, "expected the key mamba.attention.layer_norm_rms"),
        ("mamba", "ssm.group_count", 1, "expected keys whose meaning is known, got mamba.ssm.group_count = 1"),
        ("mamba2", "ssm.group_count", None, "expected the key mamba2.ssm.group_count, got none"),
        ("mamba2", "ssm.time_step_rank", 6, "blk.0.ssm_dt.bias: expected shape (6,)"),
        ("jamba", "ssm.time_step_rank", 6, "blk.0.ssm_x.weight: expected shape (38, 96)"),
        ("lfm2moe", "expert_gating_func", 1, "expert_gating_func: expected 2, got 1"),
        ("lfm2moe", "shortconv.l_cache", None, "expected the key lfm2moe.shortconv.l_cache, got none"),
        ("jamba", "ssm.dt_b_c_rms", True, "expected keys whose meaning is known, got jamba.ssm.dt_b_c_rms"),
    ],
)
def test_a_hybrid_that_is_not_understood_is_refused(tmp_path, name, key, value, message):
    case = CASES[name]
    changed = case._replace(keys=case.keys | {key: value})
    assert message in refusal(save_case(tmp_path / "a.gguf", changed, case_model(case)))


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("gemma3n", "altup.num_inputs", 3, "altup.num_inputs: expected 4, got 3"),
        ("gemma3n", "activation_sparsity_scale", [0.0], "activation_sparsity_scale: expected 3 values, got 1"),
        ("gemma3n", "activation_sparsity_scale", None, "expected the key gemma3n.activation_sparsity_scale, got none"),
        ("gemma3n", "altup.active_idx", None, "expected the key gemma3n.altup.active_idx, got none"),
        ("gemma3n", "attention.shared_kv_layers", 0, "expected shape (32, 48) for model.layers.2.self_attn.k_proj"),
        ("gemma3n", "attention.shared_kv_layers", 2, "expected a layer of each kind ahead of those, got 2 of 3"),
        ("gemma4", "attention.shared_kv_layers", 3, "expected a layer of each kind ahead of those, got 3 of 3"),
        ("gemma4", "feed_forward_length", [64, 128, 64], "feed_forward_length: expected one value, or twice as much"),
        ("gemma4", "feed_forward_length", [64, 64, 96], "feed_forward_length: expected one value, or twice as much"),
        ("gemma4", "attention.value_length", 16, "attention.value_length: expected 24, got 16"),
        ("gemma4", "attention.value_length_swa", 8, "attention.value_length_swa: expected 16, got 8"),
        ("gemma4", "rope.dimension_count_swa", 8, "rope.dimension_count_swa: expected 16, got 8"),
        ("gemma4", "attention.head_count_kv", [2, 2, 1], "expected one value for global layers and one for the others"),
        ("gemma4", "embedding_length_per_layer_input", 0, "expected tensors that a gemma4 has here, got "),
        ("gemma4 of experts", "expert_feed_forward_length", None, "expected the key gemma4.expert_feed_forward_length"),
    ],
)
def test_a_gemma_that_is_not_understood_is_refused(tmp_path, name, key, value, message):
    case = CASES[name]
    changed = case._replace(keys=case.keys | {key: value})
    assert message in refusal(save_case(tmp_path / "a.gguf", changed, case_model(case)))


@pytest.mark.parametrize("factors", [[1.0, 2.0] + [1e30] * 10, [1.0] * 3 + [0.5] * 9, [1.0] * 5])
def test_other_frequencies_of_gemma_4_are_refused(tmp_path, factors):
    case = CASES["gemma4"]

    def own(model, name, tensor):
        found = case.own(model, name, tensor)
        return found | {"rope_freqs.weight": torch.tensor(factors)} if "rope_freqs.weight" in found else found

    path = save_case(tmp_path / "a.gguf", case._replace(own=own), case_model(case))
    assert "rope_freqs.weight: expected 1 for the first frequencies of a head and 1e+30 for" in refusal(path)


def test_experts_of_gemma_4_may_lie_in_two_tensors(tmp_path):
    case = CASES["gemma4 of experts"]

    def own(model, name, tensor):
        found = dict(case.own(model, name, tensor))
        for stored in [stored for stored in found if "gate_up_exps" in stored]:
            gate, up = found.pop(stored).chunk(2, 1)
            found |= {stored.replace("gate_up", "gate"): gate, stored.replace("gate_up", "up"): up}
        return found

    model = case_model(case)
    path = save_case(tmp_path / "a.gguf", case._replace(own=own), model)
    with torch.no_grad():
        assert torch.allclose(load_gguf(path, torch.float32)[0].eval()(TOKENS).logits, model(TOKENS).logits, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("mamba", {"blk.1.ssm_a": lambda a: -a}, "blk.1.ssm_a: expected numbers of 0 or less, got "),
        ("qwen35", {"blk.0.ssm_a": lambda a: -a}, "blk.0.ssm_a: expected numbers of 0 or less, got "),
        ("jamba", {"blk.2.ssm_a": lambda a: a.T}, "blk.2.ssm_a: expected shape (96, 16)"),
        ("jamba", {"blk.0.ssm_conv1d.weight": lambda w: w.T}, "blk.0.ssm_conv1d.weight: expected shape (96, 1, 4)"),
        ("mamba", {"blk.2.ssm_dt.bias": None}, "expected all weights, got none for blk.2.ssm_dt.bias"),
        ("falcon-mamba", {"blk.0.ssm_dt_norm.weight": torch.ones(5)}, "got blk.0.ssm_dt_norm.weight"),
        ("jamba", {"blk.0.ssm_b_norm.weight": None}, "expected all weights, got none for blk.0.ssm_b_norm.weight"),
        ("lfm2moe", {"blk.1.exp_probs_b.bias": None}, "expected all weights, got none for blk.1.exp_probs_b.bias"),
        ("jamba", {"blk.0.attn_q.weight": torch.ones(48, 48)},
         "attn_q: expected one every so many layers, got it in [0, 1, 4]"),
    ],
)  # fmt: skip
def test_a_tensor_of_a_hybrid_that_is_not_as_it_should_be_is_named(tmp_path, name, changed, message):
    """changed: tensors by their names, what becomes of one that is there, None for one that is left out."""
    case = CASES[name]
    model = case_model(case)
    tensors = {stored: case.convert(model, stored, x) for stored, x in named_tensors(case, model).items()}
    for stored, change in changed.items():
        tensors[stored] = change(tensors[stored]) if callable(change) and stored in tensors else change
    there = {stored: tensor for stored, tensor in tensors.items() if tensor is not None}
    assert message in refusal(write_gguf(tmp_path / "a.gguf", case.architecture, metadata(case, model), there))


def test_layers_that_draft_are_left_out(tmp_path):
    """The drafter's layer has attention, as no layer ahead of it in its place would."""
    case = CASES["qwen35"]
    model = case_model(case)

    def own(model, name, tensor):
        drafter = {f"blk.3.{part}.weight": tensor for part in ("attn_q", "nextn.eh_proj")}
        return {"output.weight": tensor} | drafter if name == "lm_head.weight" else case.own(model, name, tensor)

    keys = {"block_count": 4, "nextn_predict_layers": 1, "attention.recurrent_layers": [True, False, True, False]}
    path = save_case(tmp_path / "a.gguf", case._replace(keys=case.keys | keys, own=own), model)
    with torch.no_grad():
        assert torch.allclose(load_gguf(path, torch.float32)[0].eval()(TOKENS).logits, model(TOKENS).logits, atol=1e-3)


def test_a_scale_that_a_file_has_lost_is_missed(tmp_path):
    case = CASES["falcon-h1"]
    tied = case._replace(changes=case.changes | {"tie_word_embeddings": True})
    assert "expected output.weight, got none" in refusal(save_case(tmp_path / "a.gguf", tied, case_model(tied)))


def test_norms_of_gemma_are_exact_in_bfloat16(tmp_path):
    """The file has one more than each weight, in float32: rounded first, most weights came back as others."""
    case = CASES["gemma"]
    model = case_model(case)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.copy_((torch.randn(weight.shape) / 10).bfloat16())
    got = load_gguf(save_case(tmp_path / "a.gguf", case, model), torch.bfloat16)[0]
    for name, weight in got.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(weight.float(), model.get_parameter(name)), name


def test_a_part_of_biases_is_read_and_the_rest_is_zero(tmp_path):
    case = CASES["llama with biases"]
    model = case_model(case)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.bias.zero_()
    held = {name: interleaved(model, name, tensor) for name, tensor in named_tensors(case, model).items()}
    some = {name: tensor for name, tensor in held.items() if not name.endswith("attn_output.bias")}
    loaded = load_gguf(write_gguf(tmp_path / "a.gguf", "llama", metadata(case, model), some), torch.float32)[0].eval()
    with torch.no_grad():
        assert torch.allclose(loaded(TOKENS).logits, model(TOKENS).logits, atol=1e-3)


def test_a_file_recommends_sampling(tmp_path, model):
    suppressed = {"tokenizer.ggml.suppress_tokens": [7, 9]}
    whole = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20} | suppressed
    source = load_source(str(file_with(tmp_path / "a.gguf", model, whole=whole)), "float32", "cpu")
    assert source.sampling == {"temperature": 0.5, "top_k": 20, "suppress_tokens": (7, 9)}
    source = load_source(str(file_with(tmp_path / "b.gguf", model, whole=suppressed)), "float32", "cpu")
    assert source.sampling == {"suppress_tokens": (7, 9)}


def test_blocks_of_a_split_file_are_found(tmp_path, model):
    save_case(tmp_path / "model.gguf", LLAMA, model, split_max_tensors=20)
    first = min(tmp_path.glob("*.gguf"))
    loaded = load_gguf(first, torch.float32)[0].eval()
    with torch.no_grad():
        assert torch.allclose(loaded(TOKENS).logits, model(TOKENS).logits, atol=1e-3)
