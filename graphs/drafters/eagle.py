"""EAGLE, EAGLE-2 and HASS: one decoder layer over the target's hidden state behind the final norm, and its head.

Source: EAGLE (arXiv 2401.15077); EAGLE-2 (arXiv 2406.16858) has the same weights and a dynamic tree; HASS (arXiv
2408.15766) trains them otherwise.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..attention import LayerCache, Pass
from ..kept import CacheLayer
from .head_layer import HeadLayer
from .recurrent import RecurrentHead


@dataclass(frozen=True)
class EagleConfig:
    """The architecture of a head. `layer` is the config of its one decoder layer, as a Llama layer."""

    layer: LlamaConfig
    feature_layer: int  # the index of the target's hidden state behind the final norm
    fc_bias: bool
    input_bias: bool  # whether queries, keys and values have biases


class EagleHead(RecurrentHead):
    """The layer has no norm at its input, nor is there one behind it: what it makes is fed back as it is."""

    def __init__(self, config: EagleConfig, lm_head: nn.Module):
        """lm_head: hidden states -> logits, the target's own head unless the checkpoint brings another."""
        super().__init__()
        layer = config.layer
        self.config, self.feature_layers, self.width = config, (config.feature_layer,), layer.hidden_size
        self.cache_layer = CacheLayer(layer.num_key_value_heads, layer.head_dim, layer.head_dim)
        self.fc = nn.Linear(2 * layer.hidden_size, layer.hidden_size, bias=config.fc_bias)
        self.layer = HeadLayer(layer, layer.hidden_size, config.input_bias)
        self.lm_head = lm_head
        self.rotary = LlamaRotaryEmbedding(layer)

    def forward(self, embedded: Tensor, hidden: Tensor, where: Pass, cache: LayerCache) -> tuple[Tensor, Tensor]:
        x = where.zeros_unless_wanted(self.fc(torch.cat([embedded, hidden], -1)))
        hidden = self.layer.run(x, where.outputs_of(x), self.rotary(x, where.positions), where, cache)
        return hidden, hidden

    def logits(self, normed: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(normed)
        return logits
