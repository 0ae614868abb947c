"""Tiny models of each architecture as GGUF files."""

from typing import Any

import torch
from gguf_case import ROPE, Case, interleaved
from gguf_gemmas import GEMMAS
from gguf_hybrids import HYBRIDS
from gguf_mambas import MAMBAS
from models import LATENT, MIXTURE, SMALL, WINDOWS
from torch import Tensor

HEAD = SMALL["hidden_size"] // SMALL["num_attention_heads"]


def one_more(model: Any, name: str, tensor: Tensor) -> Tensor:
    return tensor + 1 if name.endswith("norm.weight") else tensor


def turned(model: Any, name: str, tensor: Tensor) -> Tensor:
    linear = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
    return tensor.T if name.endswith(linear) else tensor


def norms_of_heads(model: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """One tensor of the norms of all heads."""
    if "_layernorm.norms." not in name:
        return {}
    layer, part = name.split(".")[2], name.split("_layernorm")[0][-1]
    norms = getattr(model.model.layers[int(layer)].self_attn, f"{part}_layernorm").norms
    return {f"blk.{layer}.attn_{part}_norm.weight": torch.stack([norm.weight.detach() for norm in norms])}


SWA = {"attention.sliding_window": 9}
MOE = {"expert_count": 4, "expert_used_count": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128} | ROPE
YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
GEMMA_KEYS = {"attention.key_length": 16, "attention.value_length": 16}
PATTERN = {"attention.sliding_window": 9, "attention.sliding_window_pattern": [True, False, True]}
LONGROPE = {
    "rope_type": "longrope", "original_max_position_embeddings": 128,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 2.5], "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
} | ROPE  # fmt: skip
MSCALES = {"mscale": 0.7, "mscale_all_dim": 0.7}
MSCALE_KEYS = {"rope.scaling.yarn_log_multiplier": 0.07}
LATENT_KEYS = MOE | {
    "expert_count": 8, "expert_used_count": 3, "expert_shared_count": 1, "expert_feed_forward_length": 32,
    "leading_dense_block_count": 1, "attention.q_lora_rank": 24, "attention.kv_lora_rank": 16,
    "attention.key_length": 24, "attention.value_length": 16, "attention.key_length_mla": 20,
    "attention.value_length_mla": 10, "attention.head_count_kv": 1, "rope.dimension_count": 8,
}  # fmt: skip
LOCAL = {"rope_theta": 5000.0, "rope_type": "default"}

CASES = HYBRIDS | MAMBAS | GEMMAS | {
    "llama": Case("llama", "Llama", {"rope_parameters": ROPE}, convert=interleaved),
    "llama with biases": Case("llama", "Llama", {"attention_bias": True, "mlp_bias": True}, convert=interleaved),
    "llama linear": Case(
        "llama", "Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0} | ROPE},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0}, interleaved,
    ),
    "llama yarn": Case("llama", "Llama", {"rope_parameters": YARN}, YARN_KEYS, interleaved),
    "llama head size": Case("llama", "Llama", {"head_dim": 16}, GEMMA_KEYS | {"rope.dimension_count": 16}, interleaved),
    "mistral": Case("llama", "Mistral", {"sliding_window": 9}, SWA, interleaved),
    "mixtral": Case(
        "llama", "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}, MOE, interleaved
    ),
    "mistral3": Case("mistral3", "Mistral", {"sliding_window": None}, convert=interleaved),
    "ministral3": Case(
        "mistral3", "Ministral3",
        {"head_dim": 12, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.1,
                                                    "original_max_position_embeddings": 16}},
        YARN_KEYS | {"rope.scaling.original_context_length": 16, "rope.scaling.yarn_log_multiplier": 0.5,
                     "attention.temperature_scale": 0.1}, interleaved,
    ),
    "deepseek2 of V2": Case(
        "deepseek2", "DeepseekV2", LATENT | {"n_group": 1, "topk_group": 1, "rope_parameters": YARN | MSCALES,
                                             "routed_scaling_factor": 1.5},
        LATENT_KEYS | MSCALE_KEYS | YARN_KEYS | {"expert_weights_scale": 1.5, "expert_gating_func": 1},
    ),
    "deepseek2 of 2024": Case(
        "deepseek2", "DeepseekV2",  # llama.cpp knows the small one by the number of its layers
        LATENT | {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "num_hidden_layers": 26},
        {key: value for key, value in LATENT_KEYS.items() if not key.endswith("_mla") and "q_lora" not in key}
        | {"attention.key_length": 20, "attention.value_length": 10, "attention.head_count_kv": 4},
    ),
    "deepseek2 of V3": Case(
        "deepseek2", "DeepseekV3", LATENT | {"norm_topk_prob": True, "rope_parameters": YARN | MSCALES,
                                             "routed_scaling_factor": 2.5},
        LATENT_KEYS | MSCALE_KEYS | YARN_KEYS
        | {"expert_group_count": 2, "expert_group_used_count": 1, "expert_weights_scale": 2.5,
           "expert_weights_norm": True, "expert_gating_func": 2},
    ),
    "qwen2": Case("qwen2", "Qwen2", {"rope_parameters": ROPE}),
    "qwen2 yarn": Case("qwen2", "Qwen2", {"rope_parameters": YARN | {"attention_factor": 1.1, "beta_fast": 20.0}},
                       YARN_KEYS | {"rope.scaling.yarn_attn_factor": 1.1, "rope.scaling.yarn_beta_fast": 20.0}),
    "qwen2moe": Case(
        "qwen2moe", "Qwen2Moe", MIXTURE | {"shared_expert_intermediate_size": 40},
        MOE | {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 40},
        lambda model, name, tensor: tensor.reshape(-1) if "ffn_gate_inp_shexp" in name else tensor,
    ),
    "qwen3": Case("qwen3", "Qwen3", {"head_dim": 16}, GEMMA_KEYS),
    "qwen3moe": Case(
        "qwen3moe", "Qwen3Moe", MIXTURE | {"norm_topk_prob": True},
        MOE | {"expert_feed_forward_length": 32, "attention.key_length": 12, "attention.value_length": 12},
    ),
    "gemma": Case("gemma", "Gemma", {"head_dim": 16, "tie_word_embeddings": True}, GEMMA_KEYS, one_more),
    "gemma2": Case(
        "gemma2", "Gemma2", GEMMA | {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2,
                                     "num_hidden_layers": 4},
        GEMMA_KEYS | SWA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}, one_more,
    ),
    "gemma3": Case(
        "gemma3", "Gemma3Text",
        GEMMA | WINDOWS | {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0} | ROPE,
                                               "sliding_attention": LOCAL}},
        GEMMA_KEYS | PATTERN | {"rope.freq_base_swa": 5000.0, "rope.scaling.type": "linear",
                                "rope.scaling.factor": 8.0}, one_more,
    ),
    "phi3": Case("phi3", "Phi3", {"sliding_window": 9, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
                 SWA | {"rope.dimension_count": HEAD // 2, "rope.scaling.original_context_length": 512}),
    "phi3 longrope": Case(
        "phi3", "Phi3",
        {"rope_parameters": LONGROPE | {"attention_factor": 1.2}, "original_max_position_embeddings": 128},
        {"rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": 1.2},
    ),
    "smollm3": Case("smollm3", "SmolLM3", {"num_hidden_layers": 4, "tie_word_embeddings": True}, {}, interleaved),
    "granite": Case(
        "granite", "Granite",
        {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1},
        {"embedding_scale": 12.0, "logit_scale": 8.0, "residual_scale": 0.3, "attention.scale": 0.1}, interleaved,
    ),
    "minicpm": Case(
        "minicpm", "Granite",
        {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.3,
         "attention_multiplier": HEAD**-0.5},
        {"embedding_scale": 12.0, "logit_scale": 8.0, "residual_scale": 0.3}, interleaved,
    ),
    "olmo2": Case("olmo2", "Olmo2"),
    "olmo3": Case(
        "olmo2", "Olmo3", WINDOWS | {"rope_parameters": {"full_attention": YARN,
                                                         "sliding_attention": ROPE | {"rope_type": "default"}}},
        PATTERN | YARN_KEYS,
    ),
    "olmo3 of 2025": Case(  # under the key that elsewhere is a factor beside yarn's own
        "olmo2", "Olmo3", WINDOWS | {"rope_parameters": {"full_attention": YARN | {"attention_factor": 1.25},
                                                         "sliding_attention": ROPE | {"rope_type": "default"}}},
        PATTERN | YARN_KEYS | {"rope.scaling.attn_factor": 1.25},
    ),
    "starcoder2": Case("starcoder2", "Starcoder2", {"use_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    "gpt2": Case("gpt2", "GPT2", {"tie_word_embeddings": True}, {}, turned),
    "command-r": Case("command-r", "Cohere", {"logit_scale": 0.25, "use_qk_norm": True, "tie_word_embeddings": True},
                      {"logit_scale": 0.25, "rope.scaling.type": "none"}),
    "cohere2": Case("cohere2", "Cohere2", WINDOWS | {"logit_scale": 0.25, "tie_word_embeddings": True},
                    PATTERN | {"logit_scale": 0.25}),
    "glm4": Case("glm4", "Glm4", {"head_dim": 16, "attention_bias": True,
                                  "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
                 GEMMA_KEYS | {"rope.dimension_count": 8}),
    "exaone": Case("exaone", "Llama"),
    "exaone4": Case("exaone4", "Exaone4", WINDOWS, PATTERN),
    "seed_oss": Case("seed_oss", "SeedOss", {"head_dim": 16, "attention_bias": True}, GEMMA_KEYS),
    "ernie4_5": Case("ernie4_5", "Ernie4_5", {"tie_word_embeddings": True, "head_dim": 16}, GEMMA_KEYS),
    "hunyuan-dense": Case("hunyuan-dense", "HunYuanDenseV1", {"head_dim": 16}, GEMMA_KEYS),
    "gpt-oss": Case(
        "gpt-oss", "GptOss",
        {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "head_dim": 16,
         "sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2,
         "rope_parameters": YARN | {"truncate": False}},
        YARN_KEYS | SWA | MOE | GEMMA_KEYS | {"expert_feed_forward_length": 64},
    ),
    "llama4": Case(
        "llama4", "Llama4Text",
        {"num_hidden_layers": 4, "head_dim": 12, "intermediate_size_mlp": 80, "num_local_experts": 4,
         "interleave_moe_layer_step": 2},
        MOE | {"expert_used_count": 1, "expert_feed_forward_length": 64, "feed_forward_length": 80,
               "interleave_moe_layer_step": 2, "attention.key_length": 12, "attention.value_length": 12,
               "rope.dimension_count": 12},
    ),
    "stablelm": Case(
        "stablelm", "StableLm", {"use_qkv_bias": True, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
        {"rope.dimension_count": HEAD // 2, "use_parallel_residual": True},  # as old converters say of all
    ),
    "stablelm 12b": Case(
        "stablelm", "StableLm",
        {"use_parallel_residual": True, "qk_layernorm": True, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
        {"rope.dimension_count": HEAD // 2, "use_parallel_residual": True}, own=norms_of_heads,
    ),
    "minimax-m2": Case(
        "minimax-m2", "MiniMaxM2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
         "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
        MOE | GEMMA_KEYS | {"rope.dimension_count": 8, "expert_feed_forward_length": 64, "expert_gating_func": 2},
    ),
}  # fmt: skip
