"""Tiny models of Gemma 3n and Gemma 4, as llama.cpp's converter writes them."""

import math
from typing import Any

import torch
from gguf_case import ROPE, Case
from gguf_files import Tensors
from models import SMALL
from torch import Tensor

PER_LAYER = {
    "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300,
    "tie_word_embeddings": True, "final_logit_softcapping": 30.0, "sliding_window": 9, "num_hidden_layers": 3,
}  # fmt: skip
KEYS = {
    "attention.shared_kv_layers": 1, "embedding_length_per_layer_input": 8, "final_logit_softcapping": 30.0,
    "attention.sliding_window": 9, "rope.freq_base_swa": 5000.0, "rope.freq_base": ROPE["rope_theta"],
}  # fmt: skip
LOCAL = {"rope_theta": 5000.0, "rope_type": "default"}
STREAMS = {"altup_projections": "altup_proj", "altup_unembed_projections": "altup_unembd_proj"}
SCALARS = {
    "layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "altup.correct_output_scale": "altup_correct_scale.weight",
}  # fmt: skip
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}


def own(model: Any, name: str, tensor: Tensor) -> Tensors:
    """Streams' projections in one tensor; scales; and keys of the last layer, which nobody reads."""
    parts = name.split(".")
    if parts[1] in STREAMS:
        each = [layer.weight.detach() for layer in getattr(model.model, parts[1])]
        return {f"{STREAMS[parts[1]]}.weight": torch.stack(each)}
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    if part in SCALARS:
        return {f"blk.{layer}.{SCALARS[part]}": tensor}
    if part == "experts.gate_up_proj":
        return {f"blk.{layer}.ffn_gate_up_exps.weight": tensor}
    if part == "self_attn.q_norm.weight" and model.model.layers[int(layer)].self_attn.is_kv_shared_layer:
        unread = {f"blk.{layer}.attn_{key}.weight": torch.ones(7, 48) for key in ("k", "v")}
        return unread | {f"blk.{layer}.attn_k_norm.weight": torch.ones(7), f"blk.{layer}.attn_q_norm.weight": tensor}
    return {}


def gemma4(changes: dict[str, Any], keys: dict[str, Any], global_size: int = 24) -> Case:
    """global_size: of the heads of layers without a window, of which a quarter of the frequencies turns."""
    fields = {
        "layer_types": ["sliding_attention", "full_attention", "full_attention"], "head_dim": 16,
        "global_head_dim": global_size,
        "rope_parameters": {"sliding_attention": LOCAL, "full_attention": ROPE | {
            "rope_type": "proportional", "partial_rotary_factor": 0.25}},
    }  # fmt: skip
    given = {
        "attention.key_length": global_size, "attention.value_length": global_size, "attention.key_length_swa": 16,
        "attention.value_length_swa": 16, "attention.sliding_window_pattern": [True, False, False],
        "rope.dimension_count": global_size, "rope.dimension_count_swa": 16,
    }  # fmt: skip
    return Case("gemma4", "Gemma4Text", PER_LAYER | fields | changes, KEYS | given | keys, own=with_factors)


def with_factors(model: Any, name: str, tensor: Tensor) -> Tensors:
    found = own(model, name, tensor)
    if name == "model.norm.weight":
        half = model.config.per_layer_config[1].head_dim // 2
        factors = torch.full((half,), 1e30)
        factors[: half // 4] = 1.0
        return {"rope_freqs.weight": factors, "output_norm.weight": tensor}
    return found


WIDTH = SMALL["intermediate_size"]
GEMMAS = {
    "gemma3n": Case(
        "gemma3n", "Gemma3nText",
        PER_LAYER | {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "head_dim": 16,
            "laurel_rank": 8, "altup_num_inputs": 4, "altup_active_idx": 1,
            "activation_sparsity_pattern": [0.95, 0.0, 0.5], "intermediate_size": [WIDTH, WIDTH, 2 * WIDTH],
            "rope_parameters": {"sliding_attention": LOCAL, "full_attention": ROPE | {"rope_type": "default"}},
        },
        KEYS | {
            "attention.key_length": 16, "attention.value_length": 16, "altup.active_idx": 1, "altup.num_inputs": 4,
            "attention.sliding_window_pattern": [True, False, True],
            "activation_sparsity_scale": [1.6448533535003662, -math.inf, 0.0],
        }, own=own,
    ),
    "gemma4": gemma4({"use_double_wide_mlp": True}, {"feed_forward_length": [WIDTH, WIDTH, 2 * WIDTH]}),
    "gemma4 of experts": gemma4(
        EXPERTS | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
                   "num_global_key_value_heads": 1},
        {"attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0, "expert_count": 4,
         "expert_used_count": 2, "expert_feed_forward_length": 32, "attention.head_count_kv": [2, 1, 1]}, 32,
    ),
}  # fmt: skip
