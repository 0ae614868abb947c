"""From the metadata of a GGUF file to the fields of transformers' configs: what nearly every architecture says."""

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


def sizes(metadata: Metadata, file: GgufFile, own: Fields) -> Fields:
    """What every architecture says in the same words. own: what this one says itself, in place of that. Raises
    BuildError."""
    found = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": metadata.need("embedding_length"),
        "num_hidden_layers": layer_count(metadata),
        "max_position_embeddings": metadata.need("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    width, said = "feed_forward_length", "intermediate_size" in own
    found["intermediate_size"] = metadata.get(width) if said else metadata.same(width)
    given = {field: metadata.get(key) for field, key in EPSILONS.items()}
    return found | {field: value for field, value in given.items() if value is not None}


def attention_fields(metadata: Metadata, file: GgufFile, own: Fields, partial: bool) -> Fields:
    """What every architecture with attention says in the same words. own: what this one says itself, in place of that;
    partial: see `rope_parameters`. Raises BuildError."""
    heads = metadata.same("attention.head_count")
    if not heads:
        raise BuildError(f"model: {metadata.name}: attention.head_count: expected at least 1, got {heads}")
    size = head_size(metadata)
    metadata.get("attention.value_length")  # the shape of attn_v says it
    count, said = "attention.head_count_kv", "num_key_value_heads" in own
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get(count) if said else metadata.same(count, heads),
        "head_dim": size,
        "rope_parameters": rope_parameters(metadata, file, size, partial),
    }


def has(file: GgufFile, name: str) -> bool:
    """Whether any layer has a tensor of that name."""
    return any(tensor.startswith("blk.") and tensor.endswith(f".{name}") for tensor in file.tensors)


def count(metadata: Metadata, key: str) -> int:
    """A key that is at least 1. Raises BuildError."""
    value = metadata.need(key)
    if not isinstance(value, int) or value < 1:
        raise BuildError(f"model: {metadata.name}: {key}: expected at least 1, got {value}")
    return value


def layer_count(metadata: Metadata) -> int:
    """Without those that draft."""
    return int(metadata.need("block_count") - metadata.get("nextn_predict_layers", 0))


def head_size(metadata: Metadata) -> int:
    """Of keys, unless a file says otherwise the share of a head in the width."""
    width, heads = metadata.need("embedding_length"), metadata.same("attention.head_count")
    return int(metadata.get("attention.key_length", width // heads))


def layer_types(metadata: Metadata, period: int) -> Fields:
    """Which layers have a sliding window: as the file says, else all but the last of each period."""
    window, layers = metadata.get("attention.sliding_window", 0), layer_count(metadata)
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
