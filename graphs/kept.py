"""What a traced model keeps of a row, and which models are refused by name."""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention import ATTENTION_NAME
from .convolution import has_convolutions, register_convolutions
from .hybrid_cache import RECURRENT, window_name
from .lightning_attention import has_lightning_attention, register_lightning_attention
from .linear_attention import as_kept, has_linear_attention, register_linear_attention
from .llama4 import CHUNKED, has_mixture, register_mixture
from .rope import BOUNDED_ROPE, PLAIN_ROPE, rope_kinds
from .rwkv import has_rwkv, register_rwkv
from .state import StateTensor

FEED_FORWARD = ("mlp", "moe")  # layers of hybrid models that keep nothing


class UnsupportedModel(ValueError):
    """A model that cannot be traced faithfully; the message names the reason."""


class CacheLayer(NamedTuple):
    """Shape of one layer's K and V: heads, and the head size of each."""

    heads: int
    key_size: int
    value_size: int


class Kept(NamedTuple):
    """What a model keeps of a row. caches: keys and values, by the numbers of the layers that have them; states: state
    tensors of recurrent layers, by their names, see `hybrid_cache`."""

    caches: dict[int, CacheLayer]
    states: dict[str, StateTensor]


def cache_name(model: nn.Module) -> str:
    """What the `forward` of a model or a layer calls its cache: older releases of transformers have another name, and
    RWKV has its states."""
    names = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "state") if name in names), "past_key_values")


def with_cache(model: PreTrainedModel, cache: object) -> dict[str, Any]:
    """The arguments by which a model takes a cache of ours. MiniMax's code refuses one of another class than its own
    where it may be asked to hand it back."""
    return {cache_name(model): cache, "use_cache": not has_lightning_attention(model)}


def check_config(model: PreTrainedModel) -> None:
    """Refuse what is known to be wrong under our attention. The build also compares logits (`compile.faithful`)."""
    config, name = model.config.get_text_config(), type(model).__name__
    known = {"full_attention", "sliding_attention"} | ({"conv"} if has_convolutions(model) else set())
    known |= {"linear_attention", "hybrid", *FEED_FORWARD} if has_linear_attention(model) else set()
    known |= {"linear_attention"} if has_lightning_attention(model) else set()
    known |= {CHUNKED} if has_mixture(model) else set()  # up to the length of one chunk
    odd = set(getattr(config, "layer_types", None) or ()) - known
    if odd:
        raise UnsupportedModel(
            f"model: {name} has layers of type {sorted(odd)}; expected {' or '.join(sorted(known))} only"
        )
    for kind in rope_kinds(config):
        if kind.get("rope_type", "default") not in PLAIN_ROPE | BOUNDED_ROPE:
            raise UnsupportedModel(
                f"model: {name} has rope_type {kind['rope_type']!r}, whose angles may change with the sequence length; "
                f"expected one of {sorted(PLAIN_ROPE | BOUNDED_ROPE)}"
            )
    if model.get_output_embeddings() is None or getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"model: {name} is not a decoder-only causal language model")
    if not has_rwkv(model) and not model._can_set_attn_implementation():
        raise UnsupportedModel(
            f"model: {name} computes attention in code of its own; expected a model that calls transformers' "
            "attention interface (ALL_ATTENTION_FUNCTIONS)"
        )


def kept_by(model: PreTrainedModel) -> Kept:
    """What the model keeps of a row, read off one real forward pass of one token, so no family needs a special case.
    Raises UnsupportedModel where that pass fails, or where a layer keeps nothing."""
    check_config(model)
    if model.config._attn_implementation == ATTENTION_NAME:  # it is part of another graph, too
        model.set_attn_implementation("eager")
    register_convolutions(model)
    register_linear_attention(model)
    register_rwkv(model)
    register_mixture(model)
    try:
        register_lightning_attention(model)
    except ValueError as error:
        raise UnsupportedModel(f"model: {type(model).__name__}: {error}") from error
    recorder = _ShapeRecorder(model)
    with torch.no_grad():
        token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        try:
            model(input_ids=token, position_ids=token, attention_mask=None, **with_cache(model, recorder))
        except Exception as error:  # modeling code raises anything
            raise UnsupportedModel(f"model: {type(model).__name__} cannot be traced: {reason(error)}") from error
    count = model.config.get_text_config().num_hidden_layers
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or [""] * count
    keep_nothing = {layer for layer, kind in enumerate(kinds) if kind in FEED_FORWARD}
    sharing = getattr(model.config.get_text_config(), "kv_sharing_modes", None) or []
    keep_nothing |= {layer for layer, mode in enumerate(sharing) if mode == "reuse"}  # an earlier layer's keys
    found = {*recorder.caches, *recorder.recurrent}
    if sorted(found | keep_nothing) != list(range(count)):
        raise UnsupportedModel(
            f"model: {type(model).__name__} hands keys and values, or a state, to its cache for {len(found)} of its "
            f"{count} layers; expected all that attend"
        )
    return Kept(recorder.caches, recorder.states)


def cache_layers(model: PreTrainedModel) -> list[CacheLayer]:
    """Shapes of the keys and values that a model keeps, of those layers that do, see `kept_by`."""
    caches = kept_by(model).caches
    return [caches[layer] for layer in sorted(caches)]


def reason(error: Exception) -> str:
    """An error in one line: its type, and the first line of its message."""
    first: str = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"


class _ShapeRecorder:
    """A cache that keeps nothing but the shapes it was given."""

    is_compileable = True

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.caches: dict[int, CacheLayer] = {}
        self.recurrent: set[int] = set()  # layers with states
        self.states: dict[str, StateTensor] = {}

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self.caches[layer_idx] = CacheLayer(key.shape[1], key.shape[3], value.shape[3])
        return key, value

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(
        self,
        x: Tensor,
        layer_idx: int,
        *_: object,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **__: object,
    ) -> Tensor:
        if conv_kernel_size is None:
            raise AttributeError("it does not say how many inputs its convolution has; expected conv_kernel_size")
        self._add(window_name(layer_idx, state_idx), (conv_kernel_size - 1, x.shape[1]), x.dtype, layer_idx)
        return x

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_recurrent_state(self, state: Tensor, layer_idx: int, *_: object, **__: object) -> Tensor:
        self._add(f"{RECURRENT}{layer_idx}", tuple(as_kept(self.model, state).shape[1:]), torch.float32, layer_idx)
        return state

    def _add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, layer: int) -> None:
        if name in self.states:
            raise AttributeError(f"layer {layer} keeps two states of a kind; expected one")
        self.states[name] = StateTensor(shape, dtype, in_place=True, recurrent=True)
        self.recurrent.add(layer)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"its code uses `cache.{name}`; expected keys and values, or Mamba's states, alone")
