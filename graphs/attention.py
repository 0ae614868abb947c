"""What a pass may attend to, and the attention function that transformers' models call while they are traced.

Letters: B batch, T tokens in this pass, M tree keys, H heads, G query heads per KV head, S cache slots, D head size.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..kernels.bits import chain_bits, word_count
from ..kernels.int8_rows import quantize_rows
from ..kernels.tree_attention.op import tree_attention
from .layer_number import number_of

ATTENTION_NAME = "specstep"


class Write(NamedTuple):
    """A write that waits for the tokens that are committed, see `Pass.on_commit`."""

    function: Callable[..., None]
    tensors: tuple[Tensor | None, ...]


class Pass:
    """One pass of T tokens over a cache: where each token stands and which tree keys it sees.

    lengths [B] int64, tokens committed to the cache; all of them are visible. Tree key m lies in slot `lengths + m` at
    position `lengths + key_depths[m]`; query t stands at position `lengths + depths[t]` and sees the tree keys
    whose bits are set in `ancestors[t]`.
    """

    def __init__(
        self,
        lengths: Tensor,  # [B] int64: tokens of each row in the cache; the pass sees all of them
        depths: Tensor,  # [B, T] int64: token t stands at position lengths + depths[t]
        ancestors: Tensor,  # [B, T, W] int32: packed bits, which of the M tree keys token t sees
        key_depths: Tensor,  # [B, M] int64: tree key m lies in slot lengths + m, at position lengths + key_depths[m]
        first_key: int = 0,  # the pass writes the tree keys first_key to first_key + T - 1
        wanted: Tensor | None = None,  # [1] bool: False: the pass gives zeros in this step; None: it always runs
        outputs: Tensor | None = None,  # [B, Q] int64: tokens whose outputs are returned; None: all T
        # For recurrent layers:
        parents: Tensor | None = None,  # [B, M] int64: the tree key ahead of each, -1: a committed one; None: a chain
        state: Mapping[str, Tensor] | None = None,  # what they keep of the rows, by the names of `hybrid_cache`
        count: Tensor | None = None,  # [B] int64: tokens of a chain that the pass commits itself; None: `commit` says
        earlier: dict[str, Tensor] | None = None,  # what passes over earlier keys left, see `with_earlier`
    ):
        self.lengths, self.depths, self.ancestors, self.key_depths = lengths, depths, ancestors, key_depths
        self.first_key, self.wanted, self.outputs = first_key, wanted, outputs
        self.parents, self.state, self.count = parents, state or {}, count
        self.earlier = {} if earlier is None else earlier
        self._windows: dict[int, Tensor] = {}  # layers share them
        self.writes: list[Write] = []

    @property
    def positions(self) -> Tensor:
        """[B, T] int64 position of each token in its sequence."""
        return self.lengths[:, None] + self.depths

    @property
    def slots(self) -> Tensor:
        """[B, T] int64 cache slot that each token's key and value are written to."""
        own = torch.arange(self.depths.shape[1], device=self.lengths.device) + self.first_key
        return self.lengths[:, None] + own

    def window(self, size: int) -> Tensor:
        """The `size` tokens that end with each token on its path, the first of them the oldest: int64 [B, T, size],
        their numbers as tree keys; -1 is the last committed one, -2 the one before that."""
        if size not in self._windows:
            last = self.first_key + torch.arange(self.depths.shape[1], device=self.depths.device).expand_as(self.depths)
            window = [last]
            for _ in range(size - 1):
                before = last - 1 if self.parents is None else self.parents.gather(1, last.clamp(min=0))
                last = before.where(last >= 0, last - 1)
                window.insert(0, last)
            self._windows[size] = torch.stack(window, 2)
        return self._windows[size]

    def with_earlier(self, name: str, own: Tensor) -> Tensor:
        """own [B, T, ...] of this pass's tokens -> [B, M, ...] of all tree keys so far. name: which of a model's
        tensors it is, the same in each pass over the tree."""
        if self.first_key:
            own = torch.cat([self.earlier[name], own], 1)
        self.earlier[name] = own
        return own

    def over(self, state: Mapping[str, Tensor]) -> "Pass":
        """The same pass for another model, which keeps this of the rows."""
        where = self.lengths, self.depths, self.ancestors, self.key_depths, self.first_key, self.wanted, self.outputs
        return Pass(*where, self.parents, state, self.count)

    def on_commit(self, write: Callable[..., None], *tensors: Tensor | None) -> None:
        """Leave a write to the state of the rows, write(*tensors, path [B, places], count [B]), until it is known which
        tokens are committed: the first `count` of a path."""
        if self.count is None:
            self.writes.append(Write(write, tensors))
        else:
            path = torch.arange(self.depths.shape[1], device=self.depths.device).expand_as(self.depths)
            write(*tensors, path, self.count)

    def commit(self, path: Tensor, count: Tensor) -> None:
        """Do what was left. path [B, places] int64: tokens of this pass; count [B] int64: how many are committed."""
        for write, tensors in self.writes:
            write(*tensors, path, count)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None
    ) -> Tensor:
        """query [B, H, T, D], key and value [B, H_kv, S, D] -> [B, Q, H, D], the wanted outputs; 0 stands for no
        window and no softcap."""
        lengths = self.lengths if self.wanted is None else self.lengths * self.wanted  # what is not read costs nothing
        where = (lengths, self.depths, self.ancestors, self.key_depths)
        attended = tree_attention(query, key, value, *where, scale, window, softcap, sinks)
        return self.zeros_unless_wanted(self.outputs_of(attended))

    def outputs_of(self, x: Tensor) -> Tensor:
        """x [B, T, ..] of all tokens -> [B, Q, ..] of those whose outputs are wanted."""
        if self.outputs is None:
            return x
        return x.gather(1, self.outputs.view(*self.outputs.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))

    def zeros_unless_wanted(self, x: Tensor) -> Tensor:
        """x, or zeros where the pass is not wanted: linear layers of zeros cost nothing (`kernels.linear`)."""
        return x if self.wanted is None else x.where(self.wanted, torch.zeros((), dtype=x.dtype, device=x.device))


def chain_pass(
    lengths: Tensor,
    width: int,
    most: int,
    wanted: Tensor | None = None,
    outputs: Tensor | None = None,
    state: Mapping[str, Tensor] | None = None,
    count: Tensor | None = None,
) -> Pass:
    """A pass over `width` consecutive tokens, at most `most`, that follow the committed ones. wanted, outputs, state,
    count: see `Pass`."""
    batch = lengths.shape[0]
    depths = torch.arange(width, device=lengths.device).expand(batch, -1)
    # One bit more than needed: torch.export would make a case of its own of a size that fills its last word.
    bits = chain_bits(width, word_count(most + 1), lengths.device)
    bits = bits.expand(batch, -1, -1)
    return Pass(lengths, depths, bits, depths, wanted=wanted, outputs=outputs, state=state, count=count)


class _Latest(threading.local):
    """The pass whose keys were written last, in this thread: some layers hand no keyword argument to what attends."""

    where: Pass | None = None


_latest = _Latest()


def hand_on(where: Pass) -> None:
    """Have the layer that writes its keys now attend by this pass, unless it is told one."""
    _latest.where = where


class LayerCache:
    """The engine's KV tensors in the shape of a transformers cache: writes at the pass's slots, returns all slots.

    keys, values: one tensor [B, H_kv, S, D] for each layer of this model, mutated in place; or int8, see `int8_rows`.
    """

    is_compileable = True

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], slots: Tensor):
        self.keys, self.values, self.slots = keys, values, slots

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """key, value [B, H_kv, T, D] of one layer -> that layer's whole cache. What is not finite is kept as 0: a token
        that does not see it would multiply it with 0, which is not 0."""
        row = torch.arange(key.shape[0], device=key.device)[:, None, None]
        head = torch.arange(key.shape[1], device=key.device)[:, None]
        caches = self.keys[number_of(layer_idx)], self.values[number_of(layer_idx)]
        for cache, new in zip(caches, (key, value), strict=True):
            rounded = cache.dtype == torch.int8
            new = new if rounded else new.to(cache.dtype)
            new = new.where(new.abs() <= torch.finfo(new.dtype).max, 0.0)
            new = quantize_rows(new) if rounded else new
            cache.index_put_((row, head, self.slots[:, None]), new)
        return caches

    def of_layer(self, number: int) -> dict[str, Tensor]:
        """All that there is of one layer, in the same words for each."""
        return {"keys": self.keys[number], "values": self.values[number]}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.keys[0].shape[2], 0


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_pass: Pass | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface over a `Pass`. query [B, H, T, D], key and value [B, H_kv, S, D] -> [B, T,
    H, D].
    """
    if _latest.where is not None:  # left as it is otherwise: torch.compile traces training
        attention_pass = attention_pass or _latest.where
        _latest.where = None
    if attention_pass is None:
        raise ValueError("its layers drop keyword arguments ahead of the attention function; expected them passed on")
    if attention_mask is not None:
        raise ValueError("it adds a mask of its own to the attention scores; expected a causal or sliding window only")
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    return attention_pass.attention(query, key, value, scale, sliding_window or 0, softcap or 0.0, s_aux), None


def register_attention() -> None:
    """Make `attn_implementation="specstep"` known to transformers. No mask function goes with it, so that the
    models build no mask of their own."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attend)
