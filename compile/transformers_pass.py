"""Transformers' own forward pass, behind given keys and values and given states of recurrent layers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..graphs.attention import ATTENTION_NAME
from ..graphs.experts import EXPERTS_NAME
from ..graphs.hybrid_cache import RECURRENT, window_name
from ..graphs.kept import with_cache
from ..graphs.lightning_attention import exact_rates
from ..graphs.linear_attention import takes_no_state
from ..graphs.target import CausalLM
from .routing import TokenExperts, given, in_turn, noted

States = dict[str, Tensor]  # of recurrent layers, [1, ...] each


class Layer(NamedTuple):
    """One layer's keys and values, [1, H_kv, S, D] each."""

    keys: Tensor
    values: Tensor


class GivenCache:
    """A transformers cache that starts with given keys and values and given states of recurrent layers. What a pass
    adds is kept apart: `added`, keys and values, and `after`, the states that it leaves."""

    is_compileable = False

    def __init__(self, given: Sequence[Layer] = (), layers: Sequence[int] = (), states: States | None = None):
        """given: keys and values of `layers`, in their order; states: by their names, see `hybrid_cache`."""
        self.given = dict(zip(layers, given, strict=True))
        self.states = {name: state.clone() for name, state in (states or {}).items()}  # some code writes to them
        self.added: dict[int, Layer] = {}
        self.after: States = {}

    def advanced(self) -> "GivenCache":
        """One that starts with what this one holds after a pass."""
        layers = [zip(self.given[layer], self.added[layer], strict=True) for layer in self.given]
        whole = [Layer(*(torch.cat(parts, 2) for parts in layer)) for layer in layers]
        return GivenCache(whole, list(self.given), self.states | self.after)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self.added[layer_idx] = Layer(key, value)
        if not self.given:
            return key, value
        given = self.given[layer_idx]
        return torch.cat([given.keys, key], 2), torch.cat([given.values, value], 2)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(
        self, x: Tensor, layer_idx: int, *_: object, conv_kernel_size: int, state_idx: int = 0, **__: object
    ) -> Tensor:
        """x [1, C, T], the inputs of a convolution -> with the last ones before them."""
        name = window_name(layer_idx, state_idx)
        before = self.states.get(name, x.new_zeros(1, conv_kernel_size - 1, x.shape[1])).to(x.dtype)
        whole = torch.cat([before.transpose(1, 2), x], 2)
        self.after[name] = whole[:, :, x.shape[2] :].transpose(1, 2).contiguous()
        return whole

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(f"{RECURRENT}{layer_idx}")

    def update_recurrent_state(self, state: Tensor, layer_idx: int, *_: object, **__: object) -> Tensor:
        self.after[f"{RECURRENT}{layer_idx}"] = state
        return state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return next(iter(self.given.values())).keys.shape[2] if self.given else 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length(layer_idx) + query_length, 0


def transformers_logits(
    model: CausalLM, tokens: Tensor, cache: GivenCache, taken: Sequence[TokenExperts] = ()
) -> tuple[Tensor, list[TokenExperts]]:
    """The logits, and the experts that the tokens take: those that are given, see `routing`, or their own. Code that
    takes a state for a single token alone is given one token after the other."""
    if not cache.states or not takes_no_state(model.model):
        with given(model, taken):
            return _pass(model, tokens, cache)
    logits, own = list[Tensor](), list[list[TokenExperts]]()
    for token in range(tokens.shape[1]):
        one = slice(token, token + 1)
        with given(model, [layer.at(one) for layer in taken]):
            after, takes = _pass(model, tokens[:, one], cache)
        cache = cache.advanced()
        logits.append(after)
        own.append(takes)
    return torch.cat(logits, 1), in_turn(own)


def _pass(model: CausalLM, tokens: Tensor, cache: GivenCache) -> tuple[Tensor, list[TokenExperts]]:
    """One forward pass, see `transformers_logits`."""
    module: Any = model.model
    module.set_attn_implementation("eager")
    module.set_experts_implementation("eager")
    try:
        with exact_rates(module), noted(module) as taken:
            # As `generate` gives them: not every model counts what its cache holds.
            positions = (cache.get_seq_length() + torch.arange(tokens.shape[1], device=tokens.device))[None]
            return module(input_ids=tokens, position_ids=positions, **with_cache(module, cache)).logits, taken
    finally:
        module.set_attn_implementation(ATTENTION_NAME)
        module.set_experts_implementation(EXPERTS_NAME)
