"""Fields of the configs of architectures whose layers have one feed-forward block each."""

import math

from ...errors import BuildError
from .fields import Fields, biases, has, head_size, layer_count, layer_types
from .file import GgufFile
from .metadata import Metadata
from .mixtures import experts
from .rope import rope_parameters


def llama(metadata: Metadata, file: GgufFile) -> Fields:
    """Llama, or what its name is also used for: Mistral with a window, Mixtral."""
    window = metadata.get("attention.sliding_window")
    if metadata.get("expert_count"):
        return {"model_type": "mixtral", "sliding_window": window} | experts(metadata)
    if window:
        return {"model_type": "mistral", "sliding_window": window}
    return biases(file)


def mistral3(metadata: Metadata, file: GgufFile) -> Fields:
    """Ministral 3 where queries grow with their position, else Mistral's text model, which is a Llama."""
    grows = metadata.get("attention.temperature_scale", 0.0)
    if not grows:
        return llama(metadata, file)
    rope = rope_parameters(metadata, file, head_size(metadata))
    if rope["rope_type"] != "yarn":
        raise BuildError(
            f"model: {metadata.name}: rope.scaling.type: expected yarn beside attention.temperature_scale, got "
            f"{rope['rope_type']}"
        )
    return {"model_type": "ministral3", "sliding_window": None,
            "rope_parameters": rope | {"llama_4_scaling_beta": grows}}  # fmt: skip


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


def granite(metadata: Metadata, file: GgufFile) -> Fields:
    if metadata.get("expert_count", 0) or metadata.get("expert_used_count", 0):
        raise BuildError(f"model: {metadata.name}: expert_count: expected 0 for granite, got a mixture")
    for key in [key for key in metadata.values if key.startswith("granite.ssm.")]:  # of its hybrid sisters
        metadata.get(key.removeprefix("granite."))
    metadata.get("expert_shared_feed_forward_length")  # theirs, too
    return biases(file) | granite_scales(metadata)


def granite_scales(metadata: Metadata) -> Fields:
    return {
        "logits_scaling": metadata.need("logit_scale"),
        "residual_multiplier": metadata.get("residual_scale", 0.0) or 1.0,
        "embedding_multiplier": metadata.get("embedding_scale", 0.0) or 1.0,
        "attention_multiplier": metadata.get("attention.scale", 0.0) or 1 / math.sqrt(head_size(metadata)),
    }


def minicpm(metadata: Metadata, file: GgufFile) -> Fields:
    """Granite by another name; the defaults are those of MiniCPM-2B, whose first files do not say them."""
    width, layers = metadata.need("embedding_length"), metadata.need("block_count")
    return {
        "logits_scaling": metadata.get("logit_scale", width / 256),
        "residual_multiplier": metadata.get("residual_scale", 1.4 / math.sqrt(layers)),
        "embedding_multiplier": metadata.get("embedding_scale", 12.0),
        "attention_multiplier": 1 / math.sqrt(head_size(metadata)),
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


def stablelm(metadata: Metadata, file: GgufFile) -> Fields:
    """StableLM. Blocks are parallel where the second has no norm ahead of it: old files say so of all of them."""
    metadata.get("use_parallel_residual")
    return {
        "use_qkv_bias": has(file, "attn_q.bias"),
        "qk_layernorm": has(file, "attn_q_norm.weight"),
        "use_parallel_residual": not has(file, "ffn_norm.weight"),
    }


def exaone4(metadata: Metadata, file: GgufFile) -> Fields:
    if layer_count(metadata) == 64:
        metadata.values.setdefault("exaone4.attention.sliding_window", 4096)
    return layer_types(metadata, 4)
