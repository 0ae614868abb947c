"""The rotary embedding that a GGUF file asks for, in transformers' words."""

import math
from typing import Any

import torch
from transformers import PreTrainedModel

from ...errors import BuildError
from ...graphs.rope import rope_kinds
from .file import GgufFile
from .metadata import Metadata

BY_LENGTH = ("rope_factors_short.weight", "rope_factors_long.weight")
FACTORS = "rope_freqs.weight"  # what each frequency is divided by: how a file says Llama 3's scaling


def rope_parameters(metadata: Metadata, file: GgufFile, head_size: int, partial: bool = False) -> dict[str, Any]:
    """partial: whether the architecture may rotate a part of each head alone. Raises BuildError for a scaling that is
    not known."""
    rotated = metadata.same("rope.dimension_count", head_size)
    if rotated != head_size and not partial:
        raise BuildError(
            f"model: {metadata.name}: rope.dimension_count: expected the head size {head_size} for "
            f"{metadata.architecture}, got {rotated}"
        )
    share = {"partial_rotary_factor": rotated / head_size} if partial else {}
    scaling = _by_length(metadata, file) if BY_LENGTH[0] in file.tensors else _scaling(metadata)
    return {"rope_theta": float(metadata.get("rope.freq_base", 10000.0))} | share | scaling


def _scaling(metadata: Metadata) -> dict[str, Any]:
    factor = metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear", 0.0)) or 1.0
    kind = metadata.get("rope.scaling.type", "linear" if factor != 1.0 else "none")
    original = metadata.get("rope.scaling.original_context_length")
    attention = metadata.get("rope.scaling.attn_factor", 1.0)  # of longrope's files, and of some with yarn
    if kind in ("none", "linear"):
        if attention != 1.0:
            raise BuildError(
                f"model: {metadata.name}: rope.scaling.attn_factor: expected 1 with {kind}, got {attention}"
            )
        return (
            {"rope_type": "default"} if kind == "none" or factor == 1.0 else {"rope_type": "linear", "factor": factor}
        )
    if kind == "yarn":
        return _yarn(metadata, factor, original or metadata.need("context_length"), attention)
    raise BuildError(f"model: {metadata.name}: rope.scaling.type: expected none, linear or yarn, got {kind}")


def _by_length(metadata: Metadata, file: GgufFile) -> dict[str, Any]:
    """Two tables of factors, one for short texts and one for long ones: transformers' longrope. Raises BuildError."""
    for key in ("type", "factor"):
        metadata.get(f"rope.scaling.{key}")  # they follow from the lengths
    attention = metadata.get("rope.scaling.attn_factor")  # where it is missing it follows from them, too
    if BY_LENGTH[1] not in file.tensors:
        raise BuildError(f"model: {metadata.name}: expected all weights, got none for {BY_LENGTH[1]}")
    short, long = (file.tensors[name].data.tolist() for name in BY_LENGTH)
    original = metadata.get("rope.scaling.original_context_length", metadata.need("context_length"))
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
    } | ({} if attention is None else {"attention_factor": float(attention)})


def _yarn(metadata: Metadata, factor: float, original: int, attention: float) -> dict[str, Any]:
    """llama.cpp multiplies angles' sines and cosines by attn_factor * (1 + 0.1 ln factor)."""
    if (extrapolated := metadata.get("rope.scaling.yarn_ext_factor", 1.0)) not in (1.0, -1.0):
        raise BuildError(f"model: {metadata.name}: rope.scaling.yarn_ext_factor: expected 1, got {extrapolated}")
    given = _attention_factor(metadata)
    if given is None and attention != 1.0 and metadata.architecture == "olmo2":
        given = attention  # converters of 2025 wrote transformers' own number there
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": metadata.get("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.get("rope.scaling.yarn_beta_slow", 1.0),
    }
    if given is None and (log := metadata.get("rope.scaling.yarn_log_multiplier", 0.0)):
        whole = log / 0.1 if metadata.architecture == "deepseek2" else log  # whose converter writes a tenth
        found |= {"mscale": whole if metadata.architecture == "deepseek2" else 1.0, "mscale_all_dim": whole}
    if given is not None:
        return found | {"attention_factor": float(given)}  # the converter writes transformers' own number
    return found if attention == 1.0 else found | {"attention_factor": attention * (0.1 * math.log(factor) + 1)}


def _attention_factor(metadata: Metadata) -> float | None:
    """transformers' `attention_factor` where a file has it. Its converter writes `attn_factor` by the same key, where a
    config has that: another number, 1 or less, which transformers and llama.cpp ignore. Raises BuildError for 1, which
    may be either."""
    given = metadata.get("rope.scaling.yarn_attn_factor")
    if given == 1.0:
        raise BuildError(
            f"model: {metadata.name}: rope.scaling.yarn_attn_factor: expected another number than 1, which may be the "
            "attention_factor or the attn_factor of a config; bring the model as a directory"
        )
    return None if given is None or given < 1.0 else float(given)


def divide_frequencies(model: PreTrainedModel, file: GgufFile) -> None:
    """Divide the frequencies of every rotary embedding by the file's factors, where it has some; those of a
    proportional rope are in the config. Raises BuildError."""
    if FACTORS not in file.tensors or any(kind.get("rope_type") == "proportional" for kind in rope_kinds(model.config)):
        return
    factors = torch.from_numpy(file.tensors[FACTORS].data.copy()).float()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    for name, buffer in buffers:
        if buffer.shape != factors.shape:
            raise BuildError(
                f"model: {file.path}: {FACTORS}: expected {len(buffer)} factors for {name}, got {tuple(factors.shape)}"
            )
        buffer /= factors
    if not buffers:
        raise BuildError(f"model: {file.path}: {FACTORS}: expected a model with rotary embeddings, got one without")
