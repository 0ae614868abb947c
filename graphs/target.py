"""transformers' own modeling code as a traceable pass over the engine's cache: the target, and draft models alike."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention import ATTENTION_NAME, LayerCache, Pass, register_attention
from .experts import EXPERTS_NAME, register_experts

PLAIN_ROPE = {"default", "linear", "llama3", "yarn", "proportional"}  # frequencies that do not depend on the length


class UnsupportedModel(ValueError):
    """A model that cannot be traced faithfully; the message names the reason."""


class CacheLayer(NamedTuple):
    """Shape of one layer's K and V: heads, and the head size of each."""

    heads: int
    key_size: int
    value_size: int


class CausalLM(nn.Module):
    """A causal LM that reads and writes the engine's KV tensors, those of its own layers."""

    def __init__(self, model: PreTrainedModel, feature_layers: Sequence[int] = ()):
        """`feature_layers`: layers whose input hidden states are returned as features."""
        super().__init__()
        check_config(model)
        register_attention()
        register_experts()
        model.set_attn_implementation(ATTENTION_NAME)
        model.set_experts_implementation(EXPERTS_NAME)
        self.model = model.eval().requires_grad_(False)
        self.feature_layers = tuple(feature_layers)
        self.config = model.config.get_text_config()
        self.layers: int = self.config.num_hidden_layers
        self.vocab_size: int = self.model.get_output_embeddings().weight.shape[0]
        self.max_positions: int | None = getattr(self.config, "max_position_embeddings", None)

    def forward(
        self, tokens: Tensor, where: Pass, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """tokens [B, T] int64 -> logits [B, T, V] and features [B, T, features * hidden] (None without feature layers).

        The KV of the tokens is written in place at `where.slots`.
        """
        out = self.model(**self._arguments(tokens, where, keys, values), output_hidden_states=bool(self.feature_layers))
        features = [out.hidden_states[layer] for layer in self.feature_layers]
        return out.logits, torch.cat(features, -1) if features else None

    def _arguments(
        self, tokens: Tensor, where: Pass, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> dict[str, Any]:
        positions = where.positions
        if (
            self.max_positions is not None
        ):  # nodes past a row's limit are never accepted, but must not read past a table
            positions = positions.clamp(max=self.max_positions - 1)
        cache = LayerCache(keys, values, where.slots)
        return {
            "input_ids": tokens,
            "position_ids": positions,
            "past_key_values": cache,
            "use_cache": True,
            "attention_pass": where,
        }


def check_config(model: PreTrainedModel) -> None:
    """Refuse what is known to be wrong under our attention. The build also compares logits (`compile.faithful`)."""
    config, name = model.config.get_text_config(), type(model).__name__
    odd = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if odd:
        raise UnsupportedModel(
            f"model: {name} has layers of type {sorted(odd)}; expected full_attention or sliding_attention only"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if kind.get("rope_type", "default") not in PLAIN_ROPE:
            raise UnsupportedModel(
                f"model: {name} has rope_type {kind['rope_type']!r}, whose angles change with the sequence length; "
                f"expected one of {sorted(PLAIN_ROPE)}"
            )
    if model.get_output_embeddings() is None or getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"model: {name} is not a decoder-only causal language model")


def cache_layers(model: PreTrainedModel) -> list[CacheLayer]:
    """KV shapes of a model's layers, read off one real forward pass of one token, so no family needs a special case."""
    recorder = _ShapeRecorder()
    with torch.no_grad():
        token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        model(input_ids=token, position_ids=token, past_key_values=recorder, use_cache=True, attention_mask=None)
    return [recorder.layers[index] for index in range(len(recorder.layers))]


class _ShapeRecorder:
    """A cache that keeps nothing but the shapes it was given."""

    is_compileable = True

    def __init__(self) -> None:
        self.layers: dict[int, CacheLayer] = {}

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self.layers[layer_idx] = CacheLayer(key.shape[1], key.shape[3], value.shape[3])
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0
