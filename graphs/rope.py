"""Rotary embeddings whose frequencies change past a length of the text: up to it they are plain."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

PLAIN_ROPE = {"default", "linear", "llama3", "yarn", "proportional"}  # frequencies that do not depend on the length
BOUNDED_ROPE = {"longrope", "dynamic"}  # those that do past a length


def rope_kinds(config: Any) -> list[dict[str, Any]]:
    """The parameters of each rotary embedding of a model: of one, or of one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def keep_short_frequencies(model: PreTrainedModel) -> int | None:
    """Have a model's rotary embeddings keep the frequencies of short texts -> the longest such text, None where there
    is no bound. transformers would look at the positions at each step, and take others past that length."""
    config = model.config.get_text_config()
    bounds = [_bound(kind, config) for kind in rope_kinds(config) if kind.get("rope_type") in BOUNDED_ROPE]
    if not bounds:
        return None
    for module in model.modules():
        _make_plain(module)
    return min(bounds)


def _bound(kind: dict[str, Any], config: Any) -> int:
    named = kind.get("original_max_position_embeddings") if kind["rope_type"] == "longrope" else None
    return int(named or config.max_position_embeddings)


def _make_plain(module: nn.Module) -> None:
    """The type of an embedding tells its `forward` whether to look at positions; its frequencies are there already."""
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, str) and kind in BOUNDED_ROPE:
        module.rope_type = "default"  # type: ignore[assignment]
    elif isinstance(kind, dict):
        module.rope_type = {layer: "default" if each in BOUNDED_ROPE else each for layer, each in kind.items()}  # type: ignore[assignment]
