"""RWKV's attention and token shift over the paths of a tree. transformers hands its layers their states in a list of
tensors for all of them, and computes no batch of single tokens with these: ours take their place in layers that get a
cache of ours, whose other code runs as if there were no states.

A row keeps, for each layer, the last token's inputs of its attention and of its feed-forward part, each a window of
one, and the attention's sums. Letters: B batch, T tokens in this pass, C channels.
"""

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels.shift.op import shift
from ..kernels.wkv.op import wkv
from .convolution import commit_inputs, taps
from .hybrid_cache import HybridCache, take_state

ATTENTION, FEED_FORWARD = "RwkvSelfAttention", "RwkvFeedForward"
FUNCTION = "rwkv_linear_attention"  # what its code calls
SHIFT = 2  # tokens that a layer reads: its own and the one ahead of it
# Of transformers' list: inputs of feed-forward parts and of attention, and the sums.
INPUTS, SUMS = {FEED_FORWARD: 0, ATTENTION: 1}, slice(2, 5)


class _Ahead(threading.local):
    """The inputs ahead of those that a layer gets, in this thread, until its shift returns them."""

    inputs: Tensor | None = None


_ahead = _Ahead()


class TokenShift(nn.Module):
    """[B, T, C] -> what is ahead of each token: on its own path, or in transformers' order where nothing else was
    said."""

    def __init__(self, original: nn.Module):
        super().__init__()
        self.original = original

    def forward(self, hidden: Tensor) -> Tensor:
        inputs, _ahead.inputs = _ahead.inputs, None
        shifted: Tensor = self.original(hidden) if inputs is None else inputs
        return shifted


def has_rwkv(model: PreTrainedModel) -> bool:
    """Whether the model's code has such layers."""
    return hasattr(sys.modules[type(model).__module__], FUNCTION)


def shift_sizes(model: PreTrainedModel) -> list[int]:
    """How many inputs the shifts of the model read."""
    return [SHIFT] if has_rwkv(model) else []


def register_rwkv(model: PreTrainedModel) -> None:
    """Have the model's layers compute ours over a cache of ours; for all else they stay as they are."""
    if not has_rwkv(model):
        return
    model.eval()  # its first pass then halves weights of later layers, ahead of any trace
    type(model)._can_set_attn_implementation_cached_value = True  # it has nothing to set, and warns each time otherwise
    module = sys.modules[type(model).__module__]
    function = getattr(module, FUNCTION)
    if function.__module__ != __name__:
        setattr(module, FUNCTION, either_function(function))
    for layer in model.modules():
        if type(layer).__name__ not in INPUTS:
            continue
        if not isinstance(layer.time_shift, TokenShift):
            layer.time_shift = TokenShift(layer.time_shift)
        if type(layer).forward.__module__ != __name__:
            type(layer).forward = either_layer(type(layer).forward)


def either_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ours over a row's state, and transformers' own for all else."""

    def call(time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, *given: Any, **rest: Any) -> Any:
        """key, value [B, T, C] -> [B, T, C], and the states that transformers keeps."""
        kept = take_state()
        if kept is None:
            return original(time_decay, time_first, key, value, *given, **rest)
        where = kept.where
        keys, values = (
            where.with_earlier(f"{kept.name}.{name}", x.float()) for name, x in (("key", key), ("value", value))
        )
        decay, sums = -time_decay.float().exp(), kept.tensor.unflatten(2, (3, -1))[:, 0]
        out, states = wkv(keys, values, decay, time_first.float(), sums, where.parents)
        where.on_commit(shift, kept.tensor, states.flatten(2))
        return out[:, where.first_key :].to(key.dtype), None

    return call


def either_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ours over a cache of ours, and transformers' own `forward` for all else."""

    def forward(layer: Any, hidden: Tensor, state: Any = None, **rest: Any) -> Any:
        """hidden [B, T, C] -> what the layer adds, and the states that it was given."""
        kind, number = type(layer).__name__, layer.layer_id
        if state is None or isinstance(state, list | tuple):
            return original(layer, hidden, state, **rest)
        inputs = state.update_conv_state(hidden.transpose(1, 2), number, state_idx=INPUTS[kind], conv_kernel_size=SHIFT)
        if not isinstance(state, HybridCache):
            out, listed = original(layer, hidden, _listed(layer, hidden, inputs, state), **rest)
            if kind == ATTENTION:
                state.update_recurrent_state(torch.cat([x[:, :, number] for x in listed[SUMS]], 1)[:, None], number)
            return out, state
        if kind == ATTENTION:
            state.get_recurrent_state(number)
        _ahead.inputs, _ = taps(inputs, SHIFT)
        out, _ = original(layer, hidden)
        commit_inputs(inputs)
        return out, state

    return forward


def _listed(layer: Any, hidden: Tensor, inputs: Tensor, cache: Any) -> list[Tensor]:
    """What another cache holds of a layer, as transformers' list: [B, C, layers] each. inputs: [B, C, T], those of the
    pass, with the one before them unless there was none."""
    kind, number, tokens = type(layer).__name__, layer.layer_id, hidden.shape[1]
    shape = (hidden.shape[0], hidden.shape[2], number + 1)
    listed = [hidden.new_zeros(shape) for _ in INPUTS] + [hidden.new_zeros(shape).float() for _ in range(3)]
    listed[4] -= 1e30  # as transformers begins
    listed[INPUTS[kind]][:, :, number] = nn.functional.pad(inputs, (1, 0))[:, :, -tokens - 1]
    sums = cache.get_recurrent_state(number)
    if sums is not None:
        for whole, own in zip(listed[SUMS], sums[:, 0].chunk(3, 1), strict=True):
            whole[:, :, number] = own
    return listed
