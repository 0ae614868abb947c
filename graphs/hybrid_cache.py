"""What recurrent layers keep of a row while transformers' models are traced.

Letters: B batch, T tokens in this pass, H heads, S cache slots, D head size, C channels, W inputs of a window.
"""

import re
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.fold.op import fold
from .attention import LayerCache, Pass, hand_on
from .layer_number import number_of

WINDOW, RECURRENT = "window.", "recurrent."  # state tensors, each with the number of its layer
OF_LAYER = re.compile(rf"({re.escape(WINDOW)}|{re.escape(RECURRENT)})(\d*)(\..*)?")


def window_name(layer: int, index: int = 0) -> str:
    """The state tensor of a layer's last inputs, those of the first convolution or of another."""
    return f"{WINDOW}{layer}" + (f".{index}" if index else "")


class ConvolutionInputs(NamedTuple):
    """What a layer's convolution reads: the inputs [B, M, C] of all tree keys so far, the last ones of the committed
    tokens [B, W, C], and the pass that reads them."""

    own: Tensor
    window: Tensor
    where: Pass


class RecurrentState(NamedTuple):
    """The state of a recurrent layer [B, H, ...] after the committed tokens, by its name, and the pass that reads
    it."""

    name: str
    tensor: Tensor
    where: Pass


class _Next(threading.local):
    """The state that is handed out next, in this thread: not all of transformers' code hands a state, or any keyword
    argument, to what computes its layer."""

    state: RecurrentState | None = None


_next = _Next()


def take_state() -> RecurrentState | None:
    """The state that a `HybridCache` was asked for last, once; None where another cache was."""
    state, _next.state = _next.state, None
    return state


def names_of_layer(names: Iterable[str], number: int) -> dict[str, str]:
    """Those names that are of a layer -> the name without its number."""
    found = [(name, OF_LAYER.fullmatch(name)) for name in names]
    return {name: f"{part[1]}{part[3] or ''}" for name, part in found if part and part[2] == str(number)}


def name_of_layer(name: str, number: int) -> str:
    """A name without a number, as `names_of_layer` has it -> that of a layer."""
    return OF_LAYER.sub(rf"\g<1>{number}\g<3>", name)


class Written(NamedTuple):
    """What a pass writes to a state of linear attention once its tokens are committed, see `kernels.fold`."""

    key: Tensor
    decay: Tensor
    rates: Tensor | None
    update: Tensor

    def to(self, *_: object) -> "Written":
        """Itself: some of transformers' code takes it for the state, and has that in float32."""
        return self


class HybridCache(LayerCache):
    """A `LayerCache` of a model some of whose layers keep states instead of keys and values. Writes to these are left
    to the pass, see `Pass.commit`."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], where: Pass, layers: Sequence[int]):
        """layers: the numbers of those that have keys and values, in the order of these."""
        super().__init__(keys, values, where.slots)
        self.where, self.index = where, {layer: index for index, layer in enumerate(layers)}

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        hand_on(self.where)
        return super().update(key, value, self.index[number_of(layer_idx)])

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: transformers then hands all tokens of a convolution to `update_conv_state`, one alone, too."""

    def update_conv_state(
        self, x: Tensor, layer_idx: int, *_: object, state_idx: int = 0, **__: object
    ) -> ConvolutionInputs:
        """x [B, C, T], the inputs of one of a layer's convolutions -> those that it reads."""
        name = window_name(number_of(layer_idx), state_idx)
        window = self.where.state[name]
        own = x.transpose(1, 2).to(window.dtype, memory_format=torch.contiguous_format, copy=True)
        return ConvolutionInputs(self.where.with_earlier(name, own), window, self.where)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None, as above: what computes the layer takes its state next."""
        name = f"{RECURRENT}{number_of(layer_idx)}"
        _next.state = RecurrentState(name, self.where.state[name], self.where)

    def update_recurrent_state(self, written: Written, layer_idx: int, *_: object, **__: object) -> None:
        """Have the pass write to a layer's state what its tokens leave there, once they are committed."""
        state = self.where.state[f"{RECURRENT}{number_of(layer_idx)}"]
        self.where.on_commit(fold, state, *written)

    def of_layer(self, number: int) -> dict[str, Tensor]:
        """Its keys and values, its state, and what earlier passes left of it."""
        kept = super().of_layer(self.index[number]) if number in self.index else {}
        for kind, held in (("state", self.where.state), ("earlier", self.where.earlier)):
            kept |= {f"{kind} {rest}": held[name] for name, rest in names_of_layer(held, number).items()}
        return kept

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return super().get_mask_sizes(query_length, layer_idx) if self.keys else (query_length, 0)
