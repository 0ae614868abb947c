"""Gemma's configs and weights."""

import math
from typing import Any

import torch

from ...errors import BuildError
from .fields import Fields, head_size, layer_types
from .file import GgufFile
from .metadata import Metadata
from .mixtures import experts
from .rope import FACTORS, rope_parameters
from .rules import Rule

_STREAMS = 4  # of Gemma 3n: llama.cpp converts models of four
_UNROTATED = 1e30  # what a frequency is divided by that turns nothing
GEMMA_3N = (
    *(
        Rule(rf"model\.{name}\.{at}\.weight", lambda config, each, at=at: each[at], (f"{stored}.weight",))
        for name, stored in (("altup_projections", "altup_proj"), ("altup_unembed_projections", "altup_unembd_proj"))
        for at in range(_STREAMS - 1)
    ),
    Rule(
        r"model\.layers\.(\d+)\.altup\.correct_output_scale",
        lambda config, scale: scale,
        (r"blk.\1.altup_correct_scale.weight",),
    ),
)
_LAYER = r"model\.layers\.(\d+)\."
GEMMA_4 = (
    Rule(rf"{_LAYER}layer_scalar", lambda config, scale: scale, (r"blk.\1.layer_output_scale.weight",)),
    Rule(rf"{_LAYER}router\.scale", lambda config, scale: scale, (r"blk.\1.ffn_gate_inp.scale",)),
    Rule(rf"{_LAYER}router\.per_expert_scale", lambda config, scale: scale, (r"blk.\1.ffn_down_exps.scale",)),
    Rule(rf"{_LAYER}experts\.gate_up_proj", lambda config, both: both, (r"blk.\1.ffn_gate_up_exps.weight",)),
    Rule(
        rf"{_LAYER}experts\.gate_up_proj",
        lambda config, gate, up: torch.cat([gate, up], 1),
        (r"blk.\1.ffn_gate_exps.weight", r"blk.\1.ffn_up_exps.weight"),
    ),
    Rule(rf"{_LAYER}experts\.down_proj", lambda config, down: down, (r"blk.\1.ffn_down_exps.weight",)),
)


def gemma_scale(metadata: Metadata, largest: int) -> Fields:
    """Scores are scaled by the head size, in the largest model by what a head would have of the width."""
    heads, width = metadata.same("attention.head_count"), metadata.need("embedding_length")
    share = width // heads if metadata.need("block_count") == largest else head_size(metadata)
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
    return gemma_scale(metadata, 62) | layer_types(metadata, 6) | {
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "rope_parameters": {"full_attention": whole, "sliding_attention": _local(metadata)},
    }  # fmt: skip


def gemma3n(metadata: Metadata, file: GgufFile) -> Fields:
    whole = rope_parameters(metadata, file, metadata.need("attention.key_length"))
    kinds, laurel = layer_types(metadata, 5), file.tensors.get("blk.0.laurel_l.weight")
    if (streams := metadata.need("altup.num_inputs")) != _STREAMS:
        raise BuildError(f"model: {metadata.name}: altup.num_inputs: expected {_STREAMS}, got {streams}")
    return kinds | _per_layer(metadata, file) | ({} if laurel is None else {"laurel_rank": laurel.shape[0]}) | {
        "intermediate_size": _of_layers(metadata, "feed_forward_length"),
        "final_logit_softcapping": metadata.get("final_logit_softcapping", 30.0),  # older files do not say it
        "rope_parameters": {"full_attention": whole, "sliding_attention": _local(metadata)},
        "altup_num_inputs": streams,
        "altup_active_idx": metadata.need("altup.active_idx"),
        "activation_sparsity_pattern": [
            round(0.5 + math.erf(scale / math.sqrt(2)) / 2, 6)  # the share that a normal distribution has below it
            for scale in _of_layers(metadata, "activation_sparsity_scale")
        ],
        "num_kv_shared_layers": _sharing(metadata, kinds["layer_types"], metadata.need("block_count") - 20),
    }  # fmt: skip


def gemma4(metadata: Metadata, file: GgufFile) -> Fields:
    """Its global layers have heads of another size, and its last layers may have no keys, and twice the width."""
    kinds = layer_types(metadata, 6)
    shared = _sharing(metadata, kinds["layer_types"], 0)
    whole, with_keys = [kind == "full_attention" for kind in kinds["layer_types"]], len(kinds["layer_types"]) - shared
    rope = _proportional(metadata, file, metadata.need("attention.key_length"))
    same = any(
        full and f"blk.{layer}.attn_v.weight" not in file.tensors for layer, full in enumerate(whole[:with_keys])
    )
    return kinds | _per_layer(metadata, file) | _experts(metadata) | _widths(metadata, with_keys) | {
        "attention_k_eq_v": same,
        "num_kv_shared_layers": shared,
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "rope_parameters": {"full_attention": rope, "sliding_attention": _local(metadata)},
    } | _heads(metadata, whole)  # fmt: skip


def _sharing(metadata: Metadata, kinds: list[str], default: int) -> int:
    """How many layers attend to the keys of an earlier one of their kind, the last ones. Raises BuildError."""
    shared = metadata.get("attention.shared_kv_layers", max(0, default))
    if not 0 <= shared < len(kinds) or {*kinds[: len(kinds) - shared]} != {*kinds}:
        raise BuildError(
            f"model: {metadata.name}: attention.shared_kv_layers: expected a layer of each kind ahead of those, got "
            f"{shared} of {len(kinds)}"
        )
    return int(shared)


def _widths(metadata: Metadata, with_keys: int) -> Fields:
    """Of feed-forward blocks. with_keys: the first layers, those behind them may have twice the width. Raises
    BuildError."""
    widths = _of_layers(metadata, "feed_forward_length")
    doubled = widths[-1] != widths[0]
    if widths != [widths[0] * (1 + (doubled and layer >= with_keys)) for layer in range(len(widths))]:
        raise BuildError(
            f"model: {metadata.name}: feed_forward_length: expected one value, or twice as much in the layers that "
            f"share keys, got {widths[:8]}"
        )
    return {"intermediate_size": widths[0], "use_double_wide_mlp": doubled}


def _heads(metadata: Metadata, whole: list[bool]) -> Fields:
    """Sizes and numbers of heads. whole: which layers have no window. Raises BuildError."""
    for size in ("", "_swa"):
        key, value = (metadata.need(f"attention.{part}_length{size}") for part in ("key", "value"))
        if key != value:
            raise BuildError(f"model: {metadata.name}: attention.value_length{size}: expected {key}, got {value}")
    size, local = (metadata.need(f"attention.key_length{kind}") for kind in ("", "_swa"))
    if (rotated := metadata.get("rope.dimension_count_swa", local)) != local:
        raise BuildError(f"model: {metadata.name}: rope.dimension_count_swa: expected {local}, got {rotated}")
    counts = _of_layers(metadata, "attention.head_count_kv")
    found = [{count for count, full in zip(counts, whole, strict=True) if full is kind} for kind in (True, False)]
    if [len(each) for each in found] != [1, 1]:
        raise BuildError(
            f"model: {metadata.name}: attention.head_count_kv: expected one value for global layers and one for the "
            f"others, got {counts[:8]}"
        )
    (of_whole,), (of_others,) = found
    changes = {"head_dim": size} | ({} if of_whole == of_others else {"num_key_value_heads": of_whole})
    return {
        "head_dim": local,
        "num_key_value_heads": of_others,
        "per_layer_config": {str(layer): changes for layer, full in enumerate(whole) if full},
    }


def _proportional(metadata: Metadata, file: GgufFile, size: int) -> Fields:
    """The rope of global layers: the first frequencies of a head alone. Raises BuildError."""
    found = rope_parameters(metadata, file, size)
    factors = file.tensors[FACTORS].data.tolist() if FACTORS in file.tensors else [1.0] * (size // 2)
    rotated = factors.count(1.0)
    others = factors[rotated:]
    odd = any(factor != 1 for factor in factors[:rotated]) or any(factor < _UNROTATED / 2 for factor in others)
    if found["rope_type"] != "default" or len(factors) != size // 2 or odd:
        raise BuildError(
            f"model: {metadata.name}: {FACTORS}: expected 1 for the first frequencies of a head and {_UNROTATED} for "
            f"the other ones, got {factors[:3]} to {factors[-1:]}"
        )
    return {"rope_type": "proportional", "partial_rotary_factor": 2 * rotated / size, "rope_theta": found["rope_theta"]}


def _experts(metadata: Metadata) -> Fields:
    if not metadata.get("expert_count"):
        return {"enable_moe_block": False}
    found = experts(metadata)
    return {
        "enable_moe_block": True,
        "num_experts": found["num_experts"],
        "top_k_experts": found["num_experts_per_tok"],
        "moe_intermediate_size": metadata.need("expert_feed_forward_length"),
    }


def _per_layer(metadata: Metadata, file: GgufFile) -> Fields:
    """What each layer reads of each token besides."""
    size, table = metadata.get("embedding_length_per_layer_input", 0), file.tensors.get("per_layer_token_embd.weight")
    rows = {} if table is None else {"vocab_size_per_layer_input": table.shape[0]}
    return {"hidden_size_per_layer_input": size} | rows


def _local(metadata: Metadata) -> Fields:
    """The rope of layers with a window."""
    return {"rope_type": "default", "rope_theta": float(metadata.get("rope.freq_base_swa", 10000.0))}


def _of_layers(metadata: Metadata, key: str) -> list[Any]:
    """A key that has one value for each layer, or one for all."""
    value, layers = metadata.need(key), metadata.need("block_count")
    values = value if isinstance(value, list) else [value] * layers
    if len(values) != layers:
        raise BuildError(f"model: {metadata.name}: {key}: expected {layers} values, got {len(values)}")
    return values
