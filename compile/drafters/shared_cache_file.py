"""Assistants of Gemma 4 as they are published: which target they are for, and which of its caches they read."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ...errors import BuildError
from ...graphs.attention import ATTENTION_NAME, register_attention
from ...graphs.drafters.shared_cache import SharedCache
from ...graphs.kept import kept_by
from ..config import EngineConfig
from ..source import Source
from .published import config_of, folder_of

TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


def is_shared_cache(name: str) -> bool:
    """Whether a path is an assistant that reads its target's keys and values."""
    return (config_of(name) or {}).get("model_type") in TYPES


def load_shared_cache(name: str, target: Source, config: EngineConfig) -> SharedCache:
    """The assistant -> its scorer, in the engine's dtype and on its device. Raises BuildError for another target."""
    model: Any = target.model
    text = model.config.get_text_config()
    try:
        assistant, told = AutoModelForCausalLM.from_pretrained(
            folder_of(name), dtype=getattr(torch, config.dtype), output_loading_info=True, local_files_only=True
        )
    except Exception as error:  # modeling code raises anything
        raise BuildError(
            f"drafter: {name}: expected an assistant, got {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from None
    if odd := sorted({*told["missing_keys"], *told["unexpected_keys"]}):
        raise BuildError(f"drafter: {name}: tensors do not fit: {', '.join(odd)}")
    own = assistant.config.get_text_config()
    for field, expected, got in (
        ("backbone_hidden_size", text.hidden_size, assistant.config.backbone_hidden_size),
        ("vocab_size", model.get_output_embeddings().weight.shape[0], own.vocab_size),
        ("sliding_window", getattr(text, "sliding_window", None), own.sliding_window),
    ):
        if got != expected:
            raise BuildError(f"drafter: {name}: {field}: expected {expected}, the target's, got {got}")
    caches = _caches(name, target, assistant)
    register_attention()
    assistant.set_attn_implementation(ATTENTION_NAME)
    scorer = SharedCache(assistant, model.get_input_embeddings(), text.num_hidden_layers + 1, caches)
    return scorer.to(config.build_device).eval().requires_grad_(False)


def _caches(name: str, target: Source, assistant: Any) -> dict[str, int]:
    """Kind of a layer of the assistant's -> which of the target's cache layers it reads, the last one of that kind.
    Raises BuildError where there is none, or one of other sizes."""
    kinds = getattr(target.model.config.get_text_config(), "layer_types", None) or []
    caches = kept_by(target.model).caches
    numbers, found = sorted(caches), dict[str, int]()
    for layer in assistant.model.layers:
        kind, size = layer.self_attn.layer_type, layer.self_attn.head_dim
        last = max((number for number in numbers if number < len(kinds) and kinds[number] == kind), default=None)
        if last is None or caches[last].key_size != size or caches[last].value_size != size:
            got = "none" if last is None else f"one with heads of {caches[last].key_size}"
            raise BuildError(f"drafter: {name}: expected a target with a {kind} layer with heads of {size}, got {got}")
        found[kind] = numbers.index(last)
    return found
