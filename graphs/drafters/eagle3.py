"""EAGLE-3: one decoder layer over several of the target's hidden states.

Source: EAGLE-3 (arXiv 2503.01840); EAGLE-3.1's `fc_norm` and `norm_output` (arXiv 2605.09992).
Letters: B batch, T tokens, Q of them whose outputs are wanted, H the head's hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from ..attention import LayerCache, Pass
from ..kept import CacheLayer
from .drafter import Unsaid
from .head_layer import HeadLayer
from .recurrent import RecurrentHead


@dataclass(frozen=True)
class Eagle3Config:
    """The architecture of a head."""

    layer: LlamaConfig  # config of its one decoder layer, as a Llama layer
    draft_vocab_size: int  # tokens that the head can draft
    target_hidden_size: int  # width of one hidden state of the target
    feature_layers: tuple[int, ...]  # indices of the target's hidden states that are the features
    fc_norm: bool = False  # EAGLE-3.1: a norm on each feature ahead of fc
    norm_before_fc: bool = False  # one norm over all features ahead of fc
    norm_feedback: bool = False  # EAGLE-3.1: the normed hidden state is fed back; `norm_output` in its files
    norm_before_residual: bool = False  # the residual starts from the normed hidden state
    input_norms: bool = False  # of queries and keys, as in Qwen3
    windows: tuple[int, ...] = (0,)  # tokens that each layer attends to, 0 for all
    other_layers: tuple[int, ...] | None = None  # what else `feature_layers` may be
    residual_unsaid: bool = False  # whether the publisher does not say what `norm_before_residual` is
    feedback_unsaid: bool = False  # or which hidden state is fed back, that ahead of the norm or that behind it


class MidLayer(HeadLayer):
    """The head's decoder layer, over the embedding and the hidden state side by side."""

    def __init__(self, config: Eagle3Config):
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        super().__init__(config.layer, 2 * size, config.layer.attention_bias, config.input_norms, config.windows[0])
        self.input_layernorm = LlamaRMSNorm(size, eps)
        self.hidden_norm = LlamaRMSNorm(size, eps)
        self.norm_before_residual = config.norm_before_residual

    def forward(
        self, embedded: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], where: Pass, cache: LayerCache
    ) -> Tensor:
        """embedded, hidden [B, T, H] -> hidden [B, Q, H] of the wanted outputs."""
        normed = self.hidden_norm(hidden)
        residual = where.outputs_of(normed if self.norm_before_residual else hidden)
        both = torch.cat([self.input_layernorm(embedded), normed], -1)
        return self.run(both, residual, rotary, where, cache)


class Eagle3Head(RecurrentHead):
    """The trained part: parameters only, named as in published checkpoints."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        count = len(config.feature_layers)
        layer = config.layer
        self.config, self.feature_layers, self.other_layers = config, config.feature_layers, config.other_layers
        self.feeds_normed = config.norm_feedback
        self.width = count * config.target_hidden_size
        self.cache_layer = CacheLayer(layer.num_key_value_heads, layer.head_dim, layer.head_dim)
        self.fc = nn.Linear(self.width, size, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(config.target_hidden_size, eps) for _ in range(count))
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(self.width, eps)
        self.midlayer = MidLayer(config)
        self.norm = LlamaRMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.d2t: Tensor
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.rotary = LlamaRotaryEmbedding(config.layer)

    def unsaid(self) -> list[Unsaid]:
        if not self.config.residual_unsaid:
            return []
        usual = self.config.norm_before_residual

        def swap() -> None:
            self.midlayer.norm_before_residual = not self.midlayer.norm_before_residual

        ways = ("norm_before_residual false", "norm_before_residual true")
        return [Unsaid(ways[usual], ways[not usual], swap)]

    def unsaid_of_levels(self) -> list[Unsaid]:
        def swap() -> None:
            self.feeds_normed = not self.feeds_normed

        return [Unsaid("norm_feedback true", "norm_feedback false", swap)] if self.config.feedback_unsaid else []

    def fuse(self, features: Tensor) -> Tensor:
        if self.config.fc_norm:
            parts = features.split(self.config.target_hidden_size, -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        return self.fc(features)

    def target_ids(self) -> Tensor:
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def forward(self, embedded: Tensor, hidden: Tensor, where: Pass, cache: LayerCache) -> tuple[Tensor, Tensor]:
        hidden = self.midlayer(embedded, hidden, self.rotary(hidden, where.positions), where, cache)
        normed = self.norm(hidden)
        return normed, normed if self.feeds_normed else hidden

    def logits(self, normed: Tensor) -> Tensor:
        return self.lm_head(normed)
