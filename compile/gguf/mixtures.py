"""Fields of the configs of mixtures of experts."""

from ...errors import BuildError
from .fields import Fields, has, layer_types
from .file import GgufFile
from .metadata import Metadata
from .rope import rope_parameters

CHUNK, MAVERICK = 8192, 128  # tokens that Llama 4's layers attend to; the experts of its larger model
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3  # expert_gating_func


def experts(metadata: Metadata, scores: int = SOFTMAX) -> Fields:
    """How many experts there are and are used. scores: what turns a router's logits to weights."""
    if (got := metadata.get("expert_gating_func", scores)) != scores:
        raise BuildError(f"model: {metadata.name}: expert_gating_func: expected {scores}, got {got}")
    count, used = metadata.need("expert_count"), metadata.same("expert_used_count")
    return {"num_experts": count, "num_local_experts": count, "num_experts_per_tok": used}


def sparse(metadata: Metadata, file: GgufFile) -> Fields:
    return experts(metadata) | {
        "moe_intermediate_size": metadata.same("expert_feed_forward_length", metadata.same("feed_forward_length")),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def qwen2moe(metadata: Metadata, file: GgufFile) -> Fields:
    shared = metadata.get("expert_shared_feed_forward_length", metadata.same("feed_forward_length"))
    return sparse(metadata, file) | {"shared_expert_intermediate_size": shared, "norm_topk_prob": False}


def gpt_oss(metadata: Metadata, file: GgufFile) -> Fields:
    rope = rope_parameters(metadata, file, metadata.need("attention.key_length"))
    return (
        layer_types(metadata, 2)
        | experts(metadata, SOFTMAX_OF_CHOSEN)
        | {
            "intermediate_size": metadata.need("expert_feed_forward_length"),
            "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
        }
    )


def minimax(metadata: Metadata, file: GgufFile) -> Fields:
    width = metadata.same("expert_feed_forward_length", metadata.same("feed_forward_length"))
    return experts(metadata, SIGMOID) | {"intermediate_size": width}


def llama4(metadata: Metadata, file: GgufFile) -> Fields:
    """Llama 4. llama.cpp knows its chunks, and the model whose keys are not normed by their number of experts."""
    if (window := metadata.get("attention.sliding_window", CHUNK)) != CHUNK:
        raise BuildError(f"model: {metadata.name}: attention.sliding_window: expected {CHUNK}, got {window}")
    mixture = experts(metadata, SIGMOID)
    return mixture | {
        "attention_chunk_size": CHUNK,
        "floor_scale": CHUNK,
        "attn_scale": 0.1,
        "no_rope_layer_interval": 4,
        "interleave_moe_layer_step": metadata.need("interleave_moe_layer_step"),
        "intermediate_size": metadata.need("expert_feed_forward_length"),
        "intermediate_size_mlp": metadata.need("feed_forward_length"),
        "use_qk_norm": mixture["num_experts"] != MAVERICK,
    }


def deepseek2(metadata: Metadata, file: GgufFile) -> Fields:
    """DeepSeek-V2 where a softmax scores the experts, DeepSeek-V3 where a sigmoid does. Keys and values come from one
    latent vector; only a part of each key is rotated. Files of before April 2025 have no sizes beside "mla"."""
    rotated = metadata.need("rope.dimension_count")
    size = metadata.get("attention.key_length_mla", metadata.need("attention.key_length"))
    common = {
        "head_dim": rotated,
        "num_key_value_heads": metadata.same("attention.head_count"),
        "rope_parameters": rope_parameters(metadata, file, rotated),
        "q_lora_rank": None if has(file, "attn_q.weight") else metadata.need("attention.q_lora_rank"),
        "kv_lora_rank": metadata.need("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": metadata.get("attention.value_length_mla", metadata.need("attention.value_length")),
    }
    metadata.get("attention.q_lora_rank")  # some files without such a matrix name its size
    return common | _latent_experts(metadata)


def _latent_experts(metadata: Metadata) -> Fields:
    layers, count = metadata.need("block_count"), metadata.get("expert_count", 0)
    flash = layers in (47, 48) and metadata.get("vocab_size") == 154880  # GLM-4.7-Flash, whose files do not say it
    scores = metadata.get("expert_gating_func") or (SIGMOID if flash else SOFTMAX)
    if scores not in (SOFTMAX, SIGMOID):
        raise BuildError(f"model: {metadata.name}: expert_gating_func: expected {SOFTMAX} or {SIGMOID}, got {scores}")
    groups, chosen = metadata.get("expert_group_count") or 1, metadata.get("expert_group_used_count") or 1
    divides = bool(metadata.get("expert_weights_norm", False))
    if divides and scores == SOFTMAX and count:
        raise BuildError(f"model: {metadata.name}: expert_weights_norm: expected false beside a softmax, got true")
    own = {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"} if scores == SOFTMAX else {}
    return own | {
        "model_type": "deepseek_v2" if scores == SOFTMAX else "deepseek_v3",
        "first_k_dense_replace": metadata.get("leading_dense_block_count", 0) if count else layers,
        "n_routed_experts": count or 1,
        "num_experts_per_tok": metadata.same("expert_used_count", 1),
        "n_shared_experts": metadata.need("expert_shared_count"),
        "moe_intermediate_size": metadata.same("expert_feed_forward_length"),
        "routed_scaling_factor": metadata.get("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": divides,
        "n_group": groups,
        "topk_group": chosen,
    }
