"""MiniMax's lightning attention over the paths of a tree. transformers computes it within the layer's own `forward`,
which takes a row's state for one token after the other: ours stands in its place, over our op. Letters: see
`linear_attention`.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .hybrid_cache import HybridCache, RecurrentState, Written, take_state
from .linear_attention import attend_linearly

LAYER = "MiniMaxLightningAttention"
DECAY = "decay"  # float32 [H], what we add to such a layer: what a head keeps of its state from token to token


class LinearCache:
    """A cache of ours by the names that such a layer asks for."""

    def __init__(self, cache: Any):
        self.get_linear_cache, self.update = cache.get_recurrent_state, cache.update_recurrent_state

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        self.update(state, layer_idx)


def lightning_attention(layer: Any, x: Tensor, state: RecurrentState) -> tuple[Tensor, Written]:
    """A layer over a row's state, x [B, T, hidden]: each head forgets at a rate of its own (arXiv 2401.04658) -> what
    the layer adds, [B, T, hidden], and what to write."""
    heads, size = layer.num_attention_heads, layer.head_dim
    query, key, value = layer.act_fn(layer.qkv_proj(x)).unflatten(2, (heads, 3, size)).float().unbind(3)
    decay = layer.get_buffer(DECAY)[:, None].expand(*x.shape[:2], -1, -1).contiguous()
    out, written = attend_linearly(state, query, key, value, decay, None, None)
    return layer.out_proj(torch.sigmoid(layer.output_gate(x)) * layer.norm(out.flatten(2).to(x.dtype))), written


def has_lightning_attention(model: PreTrainedModel) -> bool:
    """Whether the model's code has such layers."""
    return hasattr(sys.modules[type(model).__module__], LAYER)


def register_lightning_attention(model: PreTrainedModel) -> None:
    """Have the model's layers compute ours for the states of rows; for all else they stay as they are. Raises
    ValueError for rates that are not those of the config."""
    for layer in _layers(model):
        rates = layer.get_slope_rate().to(layer.slope_rate.device)
        if not torch.allclose(layer.slope_rate.float(), rates, rtol=1e-2, atol=1e-6):
            raise ValueError("its slope_rate differs from the one its config gives; expected the same")
        layer.register_buffer(DECAY, (-rates).exp().flatten(), persistent=False)
        if type(layer).forward.__module__ != __name__:
            type(layer).forward = either(type(layer).forward)


@contextlib.contextmanager
def exact_rates(model: PreTrainedModel) -> Iterator[None]:
    """Within it transformers' own layers forget at rates in float32, as ours do: it has tables of them in the model's
    dtype, each rounded alone, so that a prompt and the tokens behind it are computed with different ones."""
    with contextlib.ExitStack() as stack:
        for layer in _layers(model):
            rates = layer.get_slope_rate().to(layer.slope_rate.device)
            names = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
            own = {name: layer.get_buffer(name) for name in names}
            stack.callback(layer._buffers.update, own)
            layer._buffers.update(zip(names, (rates, *layer.decay_factors(rates)), strict=True))
        yield


def _layers(model: PreTrainedModel) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ == LAYER]


def either(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ours over a row's state, and transformers' own `forward` for all else."""

    def forward(layer: Any, hidden_states: Tensor, *given: Any, **rest: Any) -> Any:
        name = "cache" if "cache" in rest else "past_key_values"  # as older releases of transformers have it
        cache = rest.get(name)
        if not isinstance(cache, HybridCache):
            own = cache is None or hasattr(cache, "get_linear_cache")
            return original(layer, hidden_states, *given, **(rest if own else rest | {name: LinearCache(cache)}))
        cache.get_recurrent_state(layer.layer_idx)
        state = take_state()
        assert state is not None
        out, written = lightning_attention(layer, hidden_states, state)
        cache.update_recurrent_state(written, layer.layer_idx)
        return out, None

    return forward
