"""From the metadata of a GGUF file to the fields of transformers' configs."""

import math
from typing import Any

from ...errors import BuildError
from .file import GgufFile
from .metadata import Metadata
from .rope import rope_parameters

Fields = dict[str, Any]
EPSILONS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
}  # of norms
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3  # expert_gating_func


def common_fields(metadata: Metadata, file: GgufFile, partial: bool) -> Fields:
    """What nearly every architecture says in the same words. Raises BuildError."""
    width, heads = metadata.need("embedding_length"), metadata.same("attention.head_count")
    layers = metadata.need("block_count") - metadata.get("nextn_predict_layers", 0)
    if not heads:
        raise BuildError(f"model: {metadata.name}: attention.head_count: expected at least 1, got {heads}")
    head_size = metadata.get("attention.key_length", width // heads)
    metadata.get("attention.value_length")  # the shape of attn_v says it
    found = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "max_position_embeddings": metadata.need("context_length"),
        "intermediate_size": metadata.same("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.same("attention.head_count_kv", heads),
        "head_dim": head_size,
        "rope_parameters": rope_parameters(metadata, file, head_size, partial),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    given = {field: metadata.get(key) for field, key in EPSILONS.items()}
    return found | {field: value for field, value in given.items() if value is not None}


def has(file: GgufFile, name: str) -> bool:
    """Whether any layer has a tensor of that name."""
    return any(tensor.startswith("blk.") and tensor.endswith(f".{name}") for tensor in file.tensors)


def layer_types(metadata: Metadata, period: int) -> Fields:
    """Which layers have a sliding window: as the file says, else all but the last of each period."""
    window, layers = metadata.get("attention.sliding_window", 0), metadata.need("block_count")
    pattern = metadata.get("attention.sliding_window_pattern", period)
    slides = pattern if isinstance(pattern, list) else [pattern == 0 or (at + 1) % pattern != 0 for at in range(layers)]
    if not window:
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    kinds = ["sliding_attention" if slide else "full_attention" for slide in slides[:layers]]
    return {"sliding_window": window, "layer_types": kinds}


def biases(file: GgufFile) -> Fields:
    attention = any(has(file, f"attn_{part}.bias") for part in ("q", "k", "v", "output"))
    mlp = any(has(file, f"ffn_{part}.bias") for part in ("gate", "up", "down"))
    return {"attention_bias": attention, "mlp_bias": mlp}


def llama(metadata: Metadata, file: GgufFile) -> Fields:
    """Llama, or what its name is also used for: Mistral with a window, Mixtral."""
    window = metadata.get("attention.sliding_window")
    if metadata.get("expert_count"):
        return {"model_type": "mixtral", "sliding_window": window} | experts(metadata)
    if window:
        return {"model_type": "mistral", "sliding_window": window}
    return biases(file)


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


def gemma_scale(metadata: Metadata, largest: int) -> Fields:
    """Scores are scaled by the head size, in the largest model by what a head would have of the width."""
    heads, width = metadata.same("attention.head_count"), metadata.need("embedding_length")
    share = width // heads if metadata.need("block_count") == largest else _head_size(metadata)
    return {"query_pre_attn_scalar": share}


def gemma2(metadata: Metadata, file: GgufFile) -> Fields:
    metadata.values.setdefault("gemma2.attention.sliding_window", 4096)
    return gemma_scale(metadata, 46) | layer_types(metadata, 2) | {
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.get("final_logit_softcapping", 30.0),
    }  # fmt: skip


def gemma3(metadata: Metadata, file: GgufFile) -> Fields:
    head_size = metadata.need("attention.key_length")
    whole = rope_parameters(metadata, file, head_size)
    local = {"rope_type": "default", "rope_theta": float(metadata.get("rope.freq_base_swa", 10000.0))}
    return gemma_scale(metadata, 62) | layer_types(metadata, 6) | {
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "rope_parameters": {"full_attention": whole, "sliding_attention": local},
    }  # fmt: skip


def text_of_images(metadata: Metadata, file: GgufFile) -> Fields:
    """Sections of rotary frequencies are for images: in a text a token has one position for all of them."""
    metadata.get("rope.dimension_sections")
    return {}


def exaone(metadata: Metadata, file: GgufFile) -> Fields:
    """Some converters write the epsilon of its RMS norms under the name of the other kind."""
    if metadata.get("attention.layer_norm_rms_epsilon") is not None:
        return {}
    return {"rms_norm_eps": metadata.need("attention.layer_norm_epsilon")}


def phi3(metadata: Metadata, file: GgufFile) -> Fields:
    original = metadata.get("rope.scaling.original_context_length", metadata.need("context_length"))
    window = metadata.get("attention.sliding_window") or None
    return {"original_max_position_embeddings": original, "sliding_window": window}


def smollm3(metadata: Metadata, file: GgufFile) -> Fields:
    return biases(file) | {"no_rope_layer_interval": 4, "use_sliding_window": False}


def _head_size(metadata: Metadata) -> int:
    width, heads = metadata.need("embedding_length"), metadata.same("attention.head_count")
    return int(metadata.get("attention.key_length", width // heads))


def granite(metadata: Metadata, file: GgufFile) -> Fields:
    if metadata.get("expert_count", 0) or metadata.get("expert_used_count", 0):
        raise BuildError(f"model: {metadata.name}: expert_count: expected 0 for granite, got a mixture")
    for key in [key for key in metadata.values if key.startswith("granite.ssm.")]:  # of its hybrid sisters
        metadata.get(key.removeprefix("granite."))
    scale = metadata.get("attention.scale", 0.0) or 1 / math.sqrt(_head_size(metadata))
    return biases(file) | {
        "logits_scaling": metadata.need("logit_scale"),
        "residual_multiplier": metadata.get("residual_scale", 0.0) or 1.0,
        "embedding_multiplier": metadata.get("embedding_scale", 0.0) or 1.0,
        "attention_multiplier": scale,
    }


def minicpm(metadata: Metadata, file: GgufFile) -> Fields:
    """Granite by another name; the defaults are those of MiniCPM-2B, whose first files do not say them."""
    width, layers = metadata.need("embedding_length"), metadata.need("block_count")
    return {
        "logits_scaling": metadata.get("logit_scale", width / 256),
        "residual_multiplier": metadata.get("residual_scale", 1.4 / math.sqrt(layers)),
        "embedding_multiplier": metadata.get("embedding_scale", 12.0),
        "attention_multiplier": 1 / math.sqrt(_head_size(metadata)),
    }


def olmo2(metadata: Metadata, file: GgufFile) -> Fields:
    """OLMo 2, or OLMo 3 where there is a window: those layers are not scaled."""
    if not metadata.get("attention.sliding_window"):
        return {}
    size = metadata.need("embedding_length") // metadata.same("attention.head_count")
    whole = rope_parameters(metadata, file, metadata.get("attention.key_length", size))
    local = {"rope_type": "default", "rope_theta": float(metadata.get("rope.freq_base_swa", whole["rope_theta"]))}
    ropes = {"full_attention": whole, "sliding_attention": local}
    return {"model_type": "olmo3", "rope_parameters": ropes} | layer_types(metadata, 4)


def starcoder2(metadata: Metadata, file: GgufFile) -> Fields:
    return {
        "norm_epsilon": metadata.need("attention.layer_norm_epsilon"),
        "use_bias": has(file, "attn_q.bias"),
        "sliding_window": metadata.get("attention.sliding_window"),
        "hidden_act": "gelu_pytorch_tanh",
    }


def gpt2(metadata: Metadata, file: GgufFile) -> Fields:
    return {
        "n_positions": metadata.need("context_length"),
        "n_embd": metadata.need("embedding_length"),
        "n_layer": metadata.need("block_count"),
        "n_head": metadata.same("attention.head_count"),
        "n_inner": metadata.same("feed_forward_length"),
        "layer_norm_epsilon": metadata.need("attention.layer_norm_epsilon"),
    }


def cohere(metadata: Metadata, file: GgufFile) -> Fields:
    return {"logit_scale": metadata.need("logit_scale"), "use_qk_norm": has(file, "attn_q_norm.weight")}


def cohere2(metadata: Metadata, file: GgufFile) -> Fields:
    return {"logit_scale": metadata.need("logit_scale")} | layer_types(metadata, 4)


def glm4(metadata: Metadata, file: GgufFile) -> Fields:
    if any(metadata.get("rope.dimension_sections") or ()):
        raise BuildError(
            f"model: {metadata.name}: rope.dimension_sections: expected none for glm4, got those of a model of images, "
            "whose files have the rows of heads in another order"
        )
    return {"attention_bias": has(file, "attn_q.bias")}


def seed_oss(metadata: Metadata, file: GgufFile) -> Fields:
    return {"attention_bias": has(file, "attn_q.bias"), "attention_out_bias": has(file, "attn_output.bias"),
            "mlp_bias": has(file, "ffn_up.bias")}  # fmt: skip


def ernie(metadata: Metadata, file: GgufFile) -> Fields:
    return {"use_bias": has(file, "attn_q.bias")}


def exaone4(metadata: Metadata, file: GgufFile) -> Fields:
    if metadata.need("block_count") == 64:
        metadata.values.setdefault("exaone4.attention.sliding_window", 4096)
    return layer_types(metadata, 4)


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


def lfm2(metadata: Metadata, file: GgufFile) -> Fields:
    """Layers without attention are short convolutions."""
    attends = [f"blk.{layer}.attn_q.weight" in file.tensors for layer in range(metadata.need("block_count"))]
    return {
        "layer_types": ["full_attention" if each else "conv" for each in attends],
        "conv_L_cache": metadata.need("shortconv.l_cache"),
        "conv_bias": has(file, "shortconv.conv.bias"),
        "norm_eps": metadata.need("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,  # the file has what it is adjusted to
    }
