"""A module for multi-token prediction: the architecture's own decoder layer over an embedding and a hidden state.

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2. One module is unrolled: what it makes, normed, is fed back. A
published module takes the target's hidden state behind the final norm.
Letters: B batch, T tokens, H hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..attention import LayerCache, Pass
from ..kept import CacheLayer, cache_name
from .drafter import Unsaid
from .recurrent import RecurrentHead


class LayersInTurn(nn.ModuleList):
    """Layers of the target's class, one of which attends, in a module that has several: Nemotron-H's."""

    def forward(self, hidden_states: Tensor, cache: LayerCache, **given: Any) -> Tensor:
        """hidden_states [B, T, H] -> [B, T, H]. given: what the target's layers take besides."""
        for layer in self:
            hidden_states = layer(hidden_states, cache=cache, **given)
        return hidden_states


class MtpHead(RecurrentHead):
    """enorm and hnorm of the embedding and the hidden state, a projection of both, a layer, and a norm behind it."""

    def __init__(
        self,
        size: int,  # H, the target's hidden size
        norms: dict[str, nn.Module],  # enorm, hnorm, norm; norm is an identity where none is published
        layer: nn.Module,  # of the target's class, the first of its cache
        rotary: nn.Module | None,  # the target's; None: it has no positions
        lm_head: nn.Module,  # the target's
        layers: int,  # how many the target has
        normed: bool,  # the hidden state that it reads is the one behind the target's final norm
        cache_layer: CacheLayer,  # shape of its keys and values
        hidden_first: bool,  # the projection reads the hidden state ahead of the embedding
        bias: bool,  # of the projection
        rope_kind: str | None = None,  # the layer's type where angles depend on it
    ):
        super().__init__()
        self.enorm, self.hnorm, self.norm = norms["enorm"], norms["hnorm"], norms["norm"]
        self.proj = nn.Linear(2 * size, size, bias=bias)
        self.layer, self.rotary, self.lm_head = layer, rotary, lm_head
        self.feature_layers, self.other_layers = (layers + normed,), (layers + (not normed),)
        self.width, self.cache_layer = size, cache_layer
        self.hidden_first, self.rope_kinds = hidden_first, [rope_kind] if rope_kind else []
        self.cache_name = cache_name(layer)

    def forward(self, embedded: Tensor, hidden: Tensor, where: Pass, cache: LayerCache) -> tuple[Tensor, Tensor]:
        both = [self.enorm(embedded), self.hnorm(hidden)]
        x = where.zeros_unless_wanted(self.proj(torch.cat(both[::-1] if self.hidden_first else both, -1)))
        whole = Pass(  # its residual has all tokens
            where.lengths, where.depths, where.ancestors, where.key_depths, where.first_key, where.wanted
        )
        given: dict[str, Any] = {
            "attention_mask": None,
            "position_ids": where.positions,
            "use_cache": True,
            self.cache_name: cache,
            "attention_pass": whole,
        }
        if self.rotary is not None:
            given["position_embeddings"] = self.rotary(x, where.positions, *self.rope_kinds)
        out = self.layer(x, **given)
        normed = self.norm(where.outputs_of(out[0] if isinstance(out, tuple) else out))
        return normed, normed

    def unsaid(self) -> list[Unsaid]:
        """The order of the projection's inputs: no config says it, the code that runs a checkpoint does."""

        def swap() -> None:
            self.hidden_first = not self.hidden_first

        ways = ("the embedding first", "the hidden state first")
        return [Unsaid(ways[self.hidden_first], ways[not self.hidden_first], swap)]

    def logits(self, normed: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(normed)
        return logits
