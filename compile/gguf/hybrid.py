"""Fields of the configs of models some of whose layers keep a state in place of keys and values."""

from ...errors import BuildError
from .families import granite_scales
from .fields import Fields, biases, has
from .file import GgufFile
from .metadata import Metadata
from .mixtures import SIGMOID, experts, sparse


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
    values = _count(metadata, "ssm.time_step_rank")
    return {
        "layer_types": _layer_types(metadata, file, "linear_attention"),
        "linear_conv_kernel_dim": _count(metadata, "ssm.conv_kernel"),
        "linear_key_head_dim": _count(metadata, "ssm.state_size"),
        "linear_num_key_heads": _count(metadata, "ssm.group_count"),
        "linear_value_head_dim": _count(metadata, "ssm.inner_size") // values,
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
    heads = _count(metadata, "ssm.time_step_rank")
    return {
        "layers_block_type": [
            next((kind for name, kind in tensors.items() if f"blk.{layer}.{name}.weight" in file.tensors), "mlp")
            for layer in range(_layers(metadata))
        ],
        "conv_kernel": _count(metadata, "ssm.conv_kernel"),
        "ssm_state_size": _count(metadata, "ssm.state_size"),
        "n_groups": _count(metadata, "ssm.group_count"),
        "mamba_num_heads": heads,
        "mamba_head_dim": _count(metadata, "ssm.inner_size") // heads,
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


def mamba(metadata: Metadata, file: GgufFile) -> Fields:
    """Mamba, or Falcon Mamba where steps, keys and queries are normed."""
    fields = _without_attention(metadata, file) | {"time_step_rank": _count(metadata, "ssm.time_step_rank")}
    _check_steps(metadata, file)
    return fields | ({"model_type": "falcon_mamba"} if metadata.get("ssm.dt_b_c_rms", False) else {})


def mamba2(metadata: Metadata, file: GgufFile) -> Fields:
    heads = _count(metadata, "ssm.time_step_rank")
    return _without_attention(metadata, file) | {
        "num_heads": heads,
        "head_dim": _count(metadata, "ssm.inner_size") // heads,
        "n_groups": _count(metadata, "ssm.group_count"),
    }


def jamba(metadata: Metadata, file: GgufFile) -> Fields:
    """Jamba: every layer has a feed-forward block behind Mamba's layer or attention. None knows positions."""
    attends, offset = _period(metadata, file, "attn_q")
    routes, first = _period(metadata, file, "ffn_gate_inp")
    _check_steps(metadata, file)
    return experts(metadata) | {
        "attn_layer_period": attends,
        "attn_layer_offset": offset,
        "expert_layer_period": routes,
        "expert_layer_offset": first,
        "mamba_d_conv": _count(metadata, "ssm.conv_kernel"),
        "mamba_d_state": _count(metadata, "ssm.state_size"),
        "mamba_dt_rank": _count(metadata, "ssm.time_step_rank"),
        "mamba_expand": _expansion(metadata),
        "mamba_conv_bias": has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": has(file, "ssm_in.bias"),
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
    inner, heads = _count(metadata, "ssm.inner_size"), _count(metadata, "ssm.time_step_rank")
    return {
        "mamba_d_conv": _count(metadata, "ssm.conv_kernel"),
        "mamba_d_state": _count(metadata, "ssm.state_size"),
        "mamba_n_groups": _count(metadata, "ssm.group_count"),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // _count(metadata, "embedding_length"),
        "mamba_conv_bias": has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": has(file, "ssm_in.bias"),
    }


def _without_attention(metadata: Metadata, file: GgufFile) -> Fields:
    """Of models that are Mamba's layers alone; the keys of other blocks are there, and 0. Raises BuildError."""
    for key in ("attention.head_count", "feed_forward_length"):
        if metadata.get(key, 0):
            raise BuildError(f"model: {metadata.name}: {key}: expected 0 or none, got {metadata.get(key)}")
    return {
        "intermediate_size": _count(metadata, "ssm.inner_size"),
        "expand": _expansion(metadata),
        "state_size": _count(metadata, "ssm.state_size"),
        "conv_kernel": _count(metadata, "ssm.conv_kernel"),
        "use_conv_bias": has(file, "ssm_conv1d.bias"),
        "use_bias": has(file, "ssm_in.bias") or has(file, "ssm_out.bias"),
        "layer_norm_epsilon": metadata.need("attention.layer_norm_rms_epsilon"),
    }


def _expansion(metadata: Metadata) -> int:
    """How many times the width a layer's channels are. Raises BuildError."""
    inner, width = _count(metadata, "ssm.inner_size"), _count(metadata, "embedding_length")
    if inner % width:
        raise BuildError(f"model: {metadata.name}: ssm.inner_size: expected a multiple of {width}, got {inner}")
    return inner // width


def _check_steps(metadata: Metadata, file: GgufFile) -> None:
    """Refuse a file with a layer whose steps have lost their bias, which every one of Mamba has. Raises BuildError."""
    for layer in range(_layers(metadata)):
        bias = f"blk.{layer}.ssm_dt.bias"
        if f"blk.{layer}.ssm_in.weight" in file.tensors and bias not in file.tensors:
            raise BuildError(f"model: {metadata.name}: expected all weights, got none for {bias}")


def _period(metadata: Metadata, file: GgufFile, name: str) -> tuple[int, int]:
    """Every how many layers one has a tensor, and which is the first: past the last layer where none has. Raises
    BuildError where they are not that regular."""
    layers = _layers(metadata)
    found = [layer for layer in range(layers) if f"blk.{layer}.{name}.weight" in file.tensors]
    first = found[0] if found else layers
    period = found[1] - first if len(found) > 1 else max(layers, first + 1)
    if first >= period or found != list(range(first, layers, period)):
        raise BuildError(f"model: {metadata.name}: {name}: expected one every so many layers, got it in {found}")
    return period, first


def _count(metadata: Metadata, key: str) -> int:
    value = metadata.need(key)
    if not isinstance(value, int) or value < 1:
        raise BuildError(f"model: {metadata.name}: {key}: expected at least 1, got {value}")
    return value


def _shared_expert(metadata: Metadata, file: GgufFile) -> Fields:
    fields = sparse(metadata, file)
    width = metadata.get("expert_shared_feed_forward_length", fields["moe_intermediate_size"])
    return fields | {"shared_expert_intermediate_size": width, "norm_topk_prob": True}


def _layer_types(metadata: Metadata, file: GgufFile, other: str) -> list[str]:
    """What each layer is: attention where the file has its queries."""
    attends = [f"blk.{layer}.attn_q.weight" in file.tensors for layer in range(_layers(metadata))]
    return ["full_attention" if each else other for each in attends]


def _layers(metadata: Metadata) -> int:
    """Without those that draft."""
    return int(metadata.need("block_count") - metadata.get("nextn_predict_layers", 0))
