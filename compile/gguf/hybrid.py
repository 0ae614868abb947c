"""Fields of the configs of models some of whose layers keep a state in place of keys and values."""

from .fields import Fields, has
from .file import GgufFile
from .metadata import Metadata
from .mixtures import sparse


def lfm2(metadata: Metadata, file: GgufFile) -> Fields:
    """Layers without attention are short convolutions."""
    return {
        "layer_types": _layer_types(metadata, file, "conv"),
        "conv_L_cache": metadata.need("shortconv.l_cache"),
        "conv_bias": has(file, "shortconv.conv.bias"),
        "norm_eps": metadata.need("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,  # the file has what it is adjusted to
    }


def qwen3next(metadata: Metadata, file: GgufFile) -> Fields:
    return linear_attention(metadata, file) | _shared_expert(metadata, file)


def qwen35(metadata: Metadata, file: GgufFile) -> Fields:
    metadata.get("rope.dimension_sections")  # for images: in a text a token has one position for all of them
    return linear_attention(metadata, file)


def qwen35moe(metadata: Metadata, file: GgufFile) -> Fields:
    return qwen35(metadata, file) | _shared_expert(metadata, file)


def linear_attention(metadata: Metadata, file: GgufFile) -> Fields:
    """Layers without attention of the usual kind have gated delta rules."""
    for key in ("full_attention_interval", "attention.recurrent_layers"):
        metadata.get(key)  # the tensors say it
    values = metadata.need("ssm.time_step_rank")
    return {
        "layer_types": _layer_types(metadata, file, "linear_attention"),
        "linear_conv_kernel_dim": metadata.need("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.need("ssm.state_size"),
        "linear_num_key_heads": metadata.need("ssm.group_count"),
        "linear_value_head_dim": metadata.need("ssm.inner_size") // values,
        "linear_num_value_heads": values,
        "attention_bias": has(file, "attn_q.bias"),
    }


def _shared_expert(metadata: Metadata, file: GgufFile) -> Fields:
    fields = sparse(metadata, file)
    width = metadata.get("expert_shared_feed_forward_length", fields["moe_intermediate_size"])
    return fields | {"shared_expert_intermediate_size": width, "norm_topk_prob": True}


def _layer_types(metadata: Metadata, file: GgufFile, other: str) -> list[str]:
    """What each layer is: attention where the file has its queries."""
    layers = metadata.need("block_count") - metadata.get("nextn_predict_layers", 0)
    attends = [f"blk.{layer}.attn_q.weight" in file.tensors for layer in range(layers)]
    return ["full_attention" if each else other for each in attends]
