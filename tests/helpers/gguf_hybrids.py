"""Tiny models with recurrent layers, as llama.cpp's converter writes them."""

import re
from typing import Any

import torch
from gguf_case import Case, interleaved
from gguf_files import Tensors
from models import LINEAR, MIXTURE
from torch import Tensor

ROPE = {"rope_parameters": {"rope_theta": 20000.0, "partial_rotary_factor": 0.5}}
DELTA = LINEAR | ROPE | {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_hidden_layers": 3}
DELTA_KEYS = {
    "attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 8, "ssm.conv_kernel": 4,
    "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 64,
    "full_attention_interval": 4, "attention.recurrent_layers": [True, False, True],
}  # fmt: skip
EXPERTS = MIXTURE | {"shared_expert_intermediate_size": 40, "norm_topk_prob": True, "head_dim": 16}
EXPERT_KEYS = {
    "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 40,
}  # fmt: skip
CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4, "block_auto_adjust_ff_dim": False}
MAMBA = {
    "mamba_n_heads": 12, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_chunk_size": 8,
}  # fmt: skip
MAMBA_KEYS = {
    "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 1, "ssm.inner_size": 96, "ssm.time_step_rank": 12,
}  # fmt: skip
SCALES = {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1}
GRANITE = MAMBA | SCALES | {"layer_types": LINEAR["layer_types"], "num_experts_per_tok": 2}
GRANITE_KEYS = MAMBA_KEYS | {
    "embedding_scale": 12.0, "logit_scale": 8.0, "residual_scale": 0.3, "attention.scale": 0.1,
    "attention.head_count_kv": [0, 2, 0], "rope.dimension_count": 12, "rope.scaling.finetuned": False,
}  # fmt: skip
FALCON = MAMBA | {
    "head_dim": 16, "mamba_d_ssm": 96, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_norm_before_gate": False,
    "lm_head_multiplier": 0.5, "embedding_multiplier": 5.5, "mlp_multipliers": [0.9, 0.4], "key_multiplier": 0.4,
    "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9, "ssm_multipliers": [0.4, 0.3, 0.2, 0.5, 0.35],
    "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.25, "rope_parameters": {"rope_theta": 20000.0},
}  # fmt: skip
FALCON_KEYS = MAMBA_KEYS | {
    "ssm.group_count": 2, "attention.key_length": 16, "attention.value_length": 16, "vocab_size": 320,
}  # fmt: skip
NEMOTRON = {
    "head_dim": 16, "mamba_num_heads": 12, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 8,
    "layer_norm_epsilon": 1e-3, "time_step_min": 1e-30,
}  # fmt: skip
NEMOTRON_KEYS = MAMBA_KEYS | {
    "ssm.group_count": 2, "attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 12,
    "rope.scaling.finetuned": False, "attention.head_count_kv": [0, 2, 0, 0], "feed_forward_length": [0, 0, 64, 0],
    "attention.layer_norm_epsilon": 1e-3, "attention.layer_norm_rms_epsilon": 1e-3,
}  # fmt: skip
LAYERS = ["linear_attention", "full_attention"]
NEMOTRON_EXPERTS = NEMOTRON | {
    "layers_block_type": [*LAYERS, "moe", "linear_attention"], "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 2.5,
    "n_group": 2, "topk_group": 1,
}  # fmt: skip
NEMOTRON_EXPERT_KEYS = NEMOTRON_KEYS | {
    "feed_forward_length": [0, 0, 32, 0], "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 40, "expert_shared_count": 1, "expert_weights_norm": True,
    "expert_weights_scale": 2.5, "expert_group_count": 2, "expert_group_used_count": 1,
}  # fmt: skip


def layer(name: str) -> str:
    """The block of a parameter of transformers' model."""
    return f"blk.{name.split('.')[2]}"


def time_step(model: Any, name: str, tensor: Tensor) -> Tensors:
    return {f"{layer(name)}.ssm_dt.bias": tensor} if name.endswith("dt_bias") else {}


def delta(model: Any, name: str, tensor: Tensor) -> Tensor:
    """Of linear attention, and of the mixtures beside it."""
    if name.endswith("norm.weight") and "ssm_norm" not in name:
        return tensor + 1
    if "ffn_gate_inp_shexp" in name:
        return tensor.reshape(-1)
    return -tensor.exp() if name.endswith("ssm_a") else tensor.squeeze(1) if "ssm_conv1d" in name else tensor


def split(model: Any, name: str, tensor: Tensor) -> Tensors:
    """Each key head's query, key, values and gates: cut, head after head."""
    if not name.endswith("in_proj_qkvz.weight"):
        return time_step(model, name, tensor)
    size, parts = tensor.shape[0] // 2, ([], [], [], [])
    for head in range(2):
        of_head = tensor[head * size : (head + 1) * size].split([16, 16, 32, 32])
        for part, rows in zip(parts, of_head, strict=True):
            part.append(rows)
    query, key, value, gate = (torch.cat(part) for part in parts)
    return {f"{layer(name)}.attn_qkv.weight": torch.cat([query, key, value]), f"{layer(name)}.attn_gate.weight": gate}


def tiled(model: Any, name: str, tensor: Tensor) -> Tensor:
    """Qwen 3.5: value heads 0 and 1 belong to the first key head, 2 and 3 to the second; the file has 0, 2, 1, 3."""
    tensor = delta(model, name, tensor)
    found = re.fullmatch(r"blk\.\d+\.(attn_qkv|attn_gate|ssm_a|ssm_dt|ssm_conv1d|ssm_alpha|ssm_beta|ssm_out)\b.*", name)
    if found is None:
        return tensor
    rows = torch.arange(tensor.shape[1] if found[1] == "ssm_out" else tensor.shape[0])
    ahead = 64 if found[1] in ("attn_qkv", "ssm_conv1d") else 0
    heads = rows[ahead:].chunk(4)
    order = torch.cat([rows[:ahead], heads[0], heads[2], heads[1], heads[3]])
    return tensor[:, order] if found[1] == "ssm_out" else tensor[order]


def mamba(groups: int, tensor: Tensor, name: str) -> Tensor:
    """Vectors of Mamba-2's heads as matrices."""
    if name.endswith(("ssm_a", "ssm_d")):
        return (-tensor.exp() if name.endswith("ssm_a") else tensor).unsqueeze(1)
    if "ssm_norm" in name:
        return tensor.reshape(groups, -1)
    return tensor.squeeze(1) if name.endswith("ssm_conv1d.weight") else tensor


def granite(model: Any, name: str, tensor: Tensor) -> Tensor:
    return interleaved(model, name, mamba(1, tensor, name))


def beside_experts(model: Any, name: str, tensor: Tensor) -> Tensors:
    """Granite's feed-forward blocks for all tokens, and its router."""
    suffix = "_shexp.weight" if model.config.num_local_experts else ".weight"
    if "router" in name:
        return {f"{layer(name)}.ffn_gate_inp.weight": tensor}
    if "input_linear" in name:
        return {
            f"{layer(name)}.ffn_{part}{suffix}": half
            for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True)
        }
    return {f"{layer(name)}.ffn_down{suffix}": tensor} if "output_linear" in name else time_step(model, name, tensor)


def falcon(model: Any, name: str, tensor: Tensor) -> Tensor:
    """Every scale multiplied into the weight beside it."""
    config = model.config
    into, gate, key = config.attention_in_multiplier, *config.mlp_multipliers[:1], config.key_multiplier
    scales = {
        "token_embd": config.embedding_multiplier, "attn_q": into, "attn_k": into * key, "attn_v": into,
        "attn_output": config.attention_out_multiplier, "output.": config.lm_head_multiplier, "ffn_gate": gate,
        "ffn_down": config.mlp_multipliers[1], "ssm_out": config.ssm_out_multiplier,
    }  # fmt: skip
    if "ssm_in" in name:
        parts = zip(tensor.split([96, 96, 32, 32, 12]), config.ssm_multipliers, strict=True)
        return torch.cat([part * scale for part, scale in parts]) * config.ssm_in_multiplier
    scale = next((scale for part, scale in scales.items() if part in name), 1.0)
    return mamba(2, tensor, name) * scale


def nemotron(model: Any, name: str, tensor: Tensor) -> Tensor:
    return interleaved(model, name, mamba(2, tensor, name))  # without positions the order of rows is nothing


def ungated(model: Any, name: str, tensor: Tensor) -> Tensors:
    if name.endswith("experts.up_proj"):
        return {f"{layer(name)}.ffn_up_exps.weight": tensor}
    return time_step(model, name, tensor)


HYBRIDS = {
    "lfm2": Case(
        "lfm2", "Lfm2", CONVOLUTIONS | {"norm_eps": 1e-3, "rope_parameters": {"rope_theta": 20000.0}},
        {"shortconv.l_cache": 4, "attention.head_count_kv": [0, 2, 0], "attention.layer_norm_rms_epsilon": 1e-3},
        lambda model, name, tensor: tensor.squeeze(1) if name.endswith("shortconv.conv.weight") else tensor,
    ),
    "lfm2moe": Case(
        "lfm2moe", "Lfm2Moe",
        CONVOLUTIONS | MIXTURE | {"norm_eps": 1e-3, "num_dense_layers": 1, "rope_parameters": {"rope_theta": 20000.0},
                                  "tie_word_embeddings": True},
        {"shortconv.l_cache": 4, "attention.head_count_kv": [0, 2, 0], "attention.layer_norm_rms_epsilon": 1e-3,
         "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "leading_dense_block_count": 1,
         "expert_gating_func": 2},
        lambda model, name, tensor: tensor.squeeze(1) if name.endswith("shortconv.conv.weight") else tensor,
        lambda model, name, tensor: {f"{layer(name)}.exp_probs_b.bias": tensor} if "expert_bias" in name else {},
    ),
    "qwen3next": Case("qwen3next", "Qwen3Next", DELTA | EXPERTS, DELTA_KEYS | EXPERT_KEYS, delta, split),
    "qwen3next of 2025": Case("qwen3next", "Qwen3Next", DELTA | EXPERTS, DELTA_KEYS | EXPERT_KEYS, delta, time_step),
    "qwen35": Case(
        "qwen35", "Qwen3_5Text", DELTA, DELTA_KEYS | {"rope.dimension_sections": [2, 1, 1, 0]}, tiled, time_step
    ),
    "qwen35moe": Case(
        "qwen35moe", "Qwen3_5MoeText", DELTA | EXPERTS,
        DELTA_KEYS | EXPERT_KEYS | {"rope.dimension_sections": [2, 1, 1, 0], "feed_forward_length": None},
        tiled, time_step,
    ),
    "granitehybrid": Case(
        "granitehybrid", "GraniteMoeHybrid", GRANITE | {"num_local_experts": 4, "shared_intermediate_size": 40},
        GRANITE_KEYS | {"expert_count": 4, "expert_used_count": 2, "expert_shared_feed_forward_length": 40},
        granite, beside_experts,
    ),
    "granitehybrid of one block": Case(
        "granitehybrid", "GraniteMoeHybrid", GRANITE | {"num_local_experts": 0, "shared_intermediate_size": 64},
        GRANITE_KEYS | {"expert_count": 0, "expert_used_count": 0, "expert_shared_feed_forward_length": 64},
        granite, beside_experts,
    ),
    "granitehybrid with positions": Case(
        "granitehybrid", "GraniteMoeHybrid",
        GRANITE | {"num_local_experts": 4, "shared_intermediate_size": 40, "position_embedding_type": "rope"},
        GRANITE_KEYS | {"expert_count": 4, "expert_used_count": 2, "expert_shared_feed_forward_length": 40,
                        "rope.scaling.finetuned": True},
        granite, beside_experts,
    ),
    "falcon-h1": Case("falcon-h1", "FalconH1", FALCON, FALCON_KEYS, falcon, time_step),
    "falcon-h1 with norms": Case(
        "falcon-h1", "FalconH1", FALCON | {"mamba_rms_norm": True}, FALCON_KEYS, falcon, time_step
    ),
    "nemotron_h": Case(
        "nemotron_h", "NemotronH", NEMOTRON | {"layers_block_type": [*LAYERS, "mlp", "linear_attention"]},
        NEMOTRON_KEYS, nemotron, time_step,
    ),
    "nemotron_h_moe": Case("nemotron_h_moe", "NemotronH", NEMOTRON_EXPERTS, NEMOTRON_EXPERT_KEYS, nemotron, ungated),
    "nemotron_h_moe of latent experts": Case(
        "nemotron_h_moe", "NemotronH", NEMOTRON_EXPERTS | {"moe_latent_size": 24},
        NEMOTRON_EXPERT_KEYS | {"moe_latent_size": 24}, nemotron, ungated,
    ),
}  # fmt: skip
