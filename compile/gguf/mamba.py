"""Fields of the configs of models that are Mamba's layers alone, and of Jamba."""

from ...errors import BuildError
from .fields import Fields, count, has, layer_count
from .file import GgufFile
from .metadata import Metadata
from .mixtures import experts


def mamba(metadata: Metadata, file: GgufFile) -> Fields:
    """Mamba, or Falcon Mamba where steps, keys and queries are normed."""
    fields = _without_attention(metadata, file) | {"time_step_rank": count(metadata, "ssm.time_step_rank")}
    _check_steps(metadata, file)
    return fields | ({"model_type": "falcon_mamba"} if metadata.get("ssm.dt_b_c_rms", False) else {})


def mamba2(metadata: Metadata, file: GgufFile) -> Fields:
    heads = count(metadata, "ssm.time_step_rank")
    return _without_attention(metadata, file) | {
        "num_heads": heads,
        "head_dim": count(metadata, "ssm.inner_size") // heads,
        "n_groups": count(metadata, "ssm.group_count"),
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
        "mamba_d_conv": count(metadata, "ssm.conv_kernel"),
        "mamba_d_state": count(metadata, "ssm.state_size"),
        "mamba_dt_rank": count(metadata, "ssm.time_step_rank"),
        "mamba_expand": _expansion(metadata),
        "mamba_conv_bias": has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": has(file, "ssm_in.bias"),
    }


def _without_attention(metadata: Metadata, file: GgufFile) -> Fields:
    """Of models that are Mamba's layers alone; the keys of other blocks are there, and 0. Raises BuildError."""
    for key in ("attention.head_count", "feed_forward_length"):
        if metadata.get(key, 0):
            raise BuildError(f"model: {metadata.name}: {key}: expected 0 or none, got {metadata.get(key)}")
    return {
        "intermediate_size": count(metadata, "ssm.inner_size"),
        "expand": _expansion(metadata),
        "state_size": count(metadata, "ssm.state_size"),
        "conv_kernel": count(metadata, "ssm.conv_kernel"),
        "use_conv_bias": has(file, "ssm_conv1d.bias"),
        "use_bias": has(file, "ssm_in.bias") or has(file, "ssm_out.bias"),
        "layer_norm_epsilon": metadata.need("attention.layer_norm_rms_epsilon"),
    }


def _expansion(metadata: Metadata) -> int:
    """How many times the width a layer's channels are. Raises BuildError."""
    inner, width = count(metadata, "ssm.inner_size"), count(metadata, "embedding_length")
    if inner % width:
        raise BuildError(f"model: {metadata.name}: ssm.inner_size: expected a multiple of {width}, got {inner}")
    return inner // width


def _check_steps(metadata: Metadata, file: GgufFile) -> None:
    """Refuse a file with a layer whose steps have lost their bias, which every one of Mamba has. Raises BuildError."""
    for layer in range(layer_count(metadata)):
        bias = f"blk.{layer}.ssm_dt.bias"
        if f"blk.{layer}.ssm_in.weight" in file.tensors and bias not in file.tensors:
            raise BuildError(f"model: {metadata.name}: expected all weights, got none for {bias}")


def _period(metadata: Metadata, file: GgufFile, name: str) -> tuple[int, int]:
    """Every how many layers one has a tensor, and which is the first: past the last layer where none has. Raises
    BuildError where they are not that regular."""
    layers = layer_count(metadata)
    found = [layer for layer in range(layers) if f"blk.{layer}.{name}.weight" in file.tensors]
    first = found[0] if found else layers
    period = found[1] - first if len(found) > 1 else max(layers, first + 1)
    if first >= period or found != list(range(first, layers, period)):
        raise BuildError(f"model: {metadata.name}: {name}: expected one every so many layers, got it in {found}")
    return period, first
