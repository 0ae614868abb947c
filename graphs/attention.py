"""What a pass may attend to, and the attention function that transformers' models call while they are traced.

Letters: B batch, T tokens in this pass, M tree keys, H heads, G query heads per KV head, S cache slots, D head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION_NAME = "specstep"


class Pass:
    """One pass of T tokens over a cache: where each token stands and which tree keys it sees.

    lengths [B] int64, tokens committed to the cache; all of them are visible. Tree key m lies in slot
    `lengths + m` at position `lengths + key_depths[m]`; query t stands at position `lengths + depths[t]` and sees the
    tree keys of `ancestors[t]`.
    """

    def __init__(self, lengths: Tensor, depths: Tensor, ancestors: Tensor, key_depths: Tensor, first_key: int = 0):
        """depths [B, T] int64; ancestors [B, T, M] bool; key_depths [B, M] int64; the pass itself writes the keys
        `first_key .. first_key + T` of the M."""
        self.lengths, self.depths, self.ancestors, self.key_depths = lengths, depths, ancestors, key_depths
        self.first_key = first_key
        self._visible: dict[int | None, Tensor] = {}  # by window; all layers have the same slots

    @property
    def positions(self) -> Tensor:
        """[B, T] int64 position of each token in its sequence."""
        return self.lengths[:, None] + self.depths

    @property
    def slots(self) -> Tensor:
        """[B, T] int64 cache slot that each token's key and value are written to."""
        own = torch.arange(self.depths.shape[1], device=self.lengths.device) + self.first_key
        return self.lengths[:, None] + own

    def visible(self, slots: int, window: int | None) -> Tensor:
        """[B, T, S] bool: which cache slots each token attends to. One tensor serves all layers of a kind."""
        if window not in self._visible:
            self._visible[window] = self._make_visible(slots, window)
        return self._visible[window]

    def _make_visible(self, slots: int, window: int | None) -> Tensor:
        slot = torch.arange(slots, device=self.lengths.device)[None]
        node = slot - self.lengths[:, None]  # [B, S], negative in the committed part
        committed, in_tree = node < 0, (node >= 0) & (node < self.ancestors.shape[2])
        node = node.clamp(0, self.ancestors.shape[2] - 1)
        tree = self.ancestors.gather(2, node[:, None].expand(-1, self.depths.shape[1], -1))
        seen = committed[:, None] | (in_tree[:, None] & tree)
        if window is None:
            return seen
        key_positions = slot.where(committed, self.lengths[:, None] + self.key_depths.gather(1, node))
        return seen & (self.positions[:, :, None] - key_positions[:, None] < window)


def chain_pass(lengths: Tensor, width: int) -> Pass:
    """A pass over `width` consecutive tokens that follow the committed ones."""
    depths = torch.arange(width, device=lengths.device).expand(lengths.shape[0], -1)
    return Pass(lengths, depths, depths[:, :, None] >= depths[:, None, :], depths)


class LayerCache:
    """The engine's KV tensors in the shape of a transformers cache: writes at the pass's slots, returns all slots.

    keys, values: one tensor [B, H_kv, S, D] per layer of the whole engine, mutated in place; `first_layer` is the
    place of this model's layer 0 among them.
    """

    is_compileable = True

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], slots: Tensor, first_layer: int):
        self.keys, self.values, self.slots, self.first_layer = keys, values, slots, first_layer

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """key, value [B, H_kv, T, D] of one layer -> that layer's whole cache."""
        rows = torch.arange(key.shape[0], device=key.device)[:, None]
        caches = self.keys[self.first_layer + layer_idx], self.values[self.first_layer + layer_idx]
        for cache, new in zip(caches, (key, value), strict=True):
            cache[rows, :, self.slots] = new.transpose(1, 2).to(cache.dtype)
        return caches

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
    attention_pass: Pass,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface over a `Pass`. query [B, H, T, D], key and value [B, H_kv, S, D] -> [B, T,
    H, D].

    Grouped heads are folded into the rows of one product per KV head: no key is repeated.
    """
    batch, heads, width, size = query.shape
    kv_heads, group = key.shape[1], heads // key.shape[1]
    visible = attention_pass.visible(key.shape[2], sliding_window).repeat(1, group, 1)[:, None]  # [B, 1, G*T, S]
    scores = (query.reshape(batch, kv_heads, group * width, size) @ key.transpose(2, 3)).float()  # [B, H_kv, G*T, S]
    scores = scores * (size**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if s_aux is None:
        weights = scores.softmax(-1)
    else:  # attention sinks (GPT-OSS): one more logit per head that takes probability and gives nothing
        sinks = s_aux.float().view(1, kv_heads, group, 1).expand(batch, -1, -1, width).reshape(batch, kv_heads, -1, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    out = weights.to(value.dtype) @ value  # [B, H_kv, G*T, D]
    return out.unflatten(2, (group, width)).permute(0, 3, 1, 2, 4).reshape(batch, width, heads, -1), None


def register_attention() -> None:
    """Make `attn_implementation="specstep"` known to transformers. No mask function goes with it, so that the
    models build no mask of their own."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attend)
