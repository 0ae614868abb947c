"""Fields of the configs of models some of whose layers keep a state in place of keys and values."""

from ...errors import BuildError
from .families import granite_scales
from .fields import Fields, biases, count, has, layer_count
from .file import GgufFile
from .metadata import Metadata
from .mixtures import SIGMOID, experts, sparse


def lfm2(metadata: Metadata, file: GgufFile) -> Fields:
    return _short_convolutions(metadata, file) | {
        "block_auto_adjust_ff_dim": False
    }  # the file has what it is adjusted to


def lfm2moe(metadata: Metadata, file: GgufFile) -> Fields:
    return _short_convolutions(metadata, file) | experts(metadata, SIGMOID) | {
        "moe_intermediate_size": metadata.same("expert_feed_forward_length", metadata.same("feed_forward_length")),
        "num_dense_layers": metadata.get("leading_dense_block_count", 0),
        "use_expert_bias": True,  # llama.cpp reads no file without
        "norm_topk_prob": metadata.get("expert_weights_norm", True),
        "routed_scaling_factor": metadata.get("expert_weights_scale", 0.0) or 1.0,
    }  # fmt: skip


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
    values = count(metadata, "ssm.time_step_rank")
    return {
        "layer_types": _layer_types(metadata, file, "linear_attention"),
        "linear_conv_kernel_dim": count(metadata, "ssm.conv_kernel"),
        "linear_key_head_dim": count(metadata, "ssm.state_size"),
        "linear_num_key_heads": count(metadata, "ssm.group_count"),
        "linear_value_head_dim": count(metadata, "ssm.inner_size") // values,
        "linear_num_value_heads": values,
        "attention_bias": has(file, "attn_q.bias"),
    }


def granitehybrid(metadata: Metadata, file: GgufFile) -> Fields:
    """Granite 4. Not Bamba, which rotates a part of each head: llama.cpp expects its rows in another order than the
    converter writes, and no key tells which of the two a file has."""
    rotates = metadata.get("rope.scaling.finetuned", True)
    mixture = experts(metadata) if metadata.get("expert_count") else {"num_local_experts": 0}
    metadata.get("expert_used_count")  # 0 where there are none
    width = metadata.get("expert_shared_feed_forward_length", metadata.same("feed_forward_length"))
    return _mamba(metadata, file) | granite_scales(metadata) | mixture | {
        "layer_types": _layer_types(metadata, file, "linear_attention"),
        "position_embedding_type": "rope" if rotates else None,
        "shared_intermediate_size": width,
    } | biases(file)  # fmt: skip


def falcon_h1(metadata: Metadata, file: GgufFile) -> Fields:
    """Falcon H1: every layer has both. The converter multiplies all scales into the weights, those of embedding and
    head, too, so that a file of a tied model has lost one of the two."""
    if "output.weight" not in file.tensors:
        raise BuildError(
            f"model: {metadata.name}: expected output.weight, got none: its scale is not in a file of falcon-h1 whose "
            "head is the embedding; give the directory that the file was made from"
        )
    return _mamba(metadata, file) | biases(file) | {
        "mamba_d_ssm": metadata.need("ssm.inner_size"),
        "mamba_rms_norm": has(file, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # llama.cpp knows no other
        "projectors_bias": has(file, "ssm_out.bias"),
    }  # fmt: skip


def nemotron_h(metadata: Metadata, file: GgufFile) -> Fields:
    """Nemotron H: a layer has a state, attention or a feed-forward block. None knows positions."""
    metadata.get("rope.scaling.finetuned")
    tensors = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    heads = count(metadata, "ssm.time_step_rank")
    return {
        "layers_block_type": [
            next((kind for name, kind in tensors.items() if f"blk.{layer}.{name}.weight" in file.tensors), "mlp")
            for layer in range(layer_count(metadata))
        ],
        "conv_kernel": count(metadata, "ssm.conv_kernel"),
        "ssm_state_size": count(metadata, "ssm.state_size"),
        "n_groups": count(metadata, "ssm.group_count"),
        "mamba_num_heads": heads,
        "mamba_head_dim": count(metadata, "ssm.inner_size") // heads,
        "use_conv_bias": has(file, "ssm_conv1d.bias"),
        "use_bias": has(file, "ssm_in.bias") or has(file, "ssm_out.bias"),
        "layer_norm_epsilon": _epsilon(metadata),
        "time_step_min": 1e-30,  # of where training began; transformers alone takes it for a bound, and its logarithm
    } | biases(file)


def nemotron_h_moe(metadata: Metadata, file: GgufFile) -> Fields:
    fields = experts(metadata, SIGMOID)
    width = metadata.same("expert_feed_forward_length", metadata.same("feed_forward_length"))
    return nemotron_h(metadata, file) | {
        "n_routed_experts": fields["num_experts"],
        "num_experts_per_tok": fields["num_experts_per_tok"],
        "n_shared_experts": metadata.get("expert_shared_count", 1),
        "moe_intermediate_size": width,
        "moe_shared_expert_intermediate_size": metadata.need("expert_shared_feed_forward_length"),
        "moe_latent_size": metadata.get("moe_latent_size"),
        "routed_scaling_factor": metadata.get("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": metadata.get("expert_weights_norm", False),
        "n_group": metadata.get("expert_group_count") or 1,
        "topk_group": metadata.get("expert_group_used_count") or 1,
    }


def _short_convolutions(metadata: Metadata, file: GgufFile) -> Fields:
    """Of models whose layers without attention are that."""
    return {
        "layer_types": _layer_types(metadata, file, "conv"),
        "conv_L_cache": metadata.need("shortconv.l_cache"),
        "conv_bias": has(file, "shortconv.conv.bias"),
        "norm_eps": metadata.need("attention.layer_norm_rms_epsilon"),
    }


def _epsilon(metadata: Metadata) -> float:
    """Under either name or both."""
    keys = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
    given = {value for value in map(metadata.get, keys) if value is not None}
    if len(given) != 1:
        raise BuildError(f"model: {metadata.name}: {' and '.join(keys)}: expected one value, got {sorted(given)}")
    return float(given.pop())


def _mamba(metadata: Metadata, file: GgufFile) -> Fields:
    """Of Mamba-2's layers."""
    inner, heads = count(metadata, "ssm.inner_size"), count(metadata, "ssm.time_step_rank")
    return {
        "mamba_d_conv": count(metadata, "ssm.conv_kernel"),
        "mamba_d_state": count(metadata, "ssm.state_size"),
        "mamba_n_groups": count(metadata, "ssm.group_count"),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // count(metadata, "embedding_length"),
        "mamba_conv_bias": has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": has(file, "ssm_in.bias"),
    }


def _shared_expert(metadata: Metadata, file: GgufFile) -> Fields:
    fields = sparse(metadata, file)
    width = metadata.get("expert_shared_feed_forward_length", fields["moe_intermediate_size"])
    return fields | {"shared_expert_intermediate_size": width, "norm_topk_prob": True}


def _layer_types(metadata: Metadata, file: GgufFile, other: str) -> list[str]:
    """What each layer is: attention where the file has its queries."""
    attends = [f"blk.{layer}.attn_q.weight" in file.tensors for layer in range(layer_count(metadata))]
    return ["full_attention" if each else other for each in attends]
