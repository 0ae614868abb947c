"""Hydra: a block and a head for each position, over the target's hidden state and the tokens of the path to it. In
Hydra++ a decoder layer over the hidden states of all positions comes first.

Source: Hydra (arXiv 2402.05109). Letters: B batch, T tokens, F frontier nodes, H hidden size, K candidates.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from ..attention import LayerCache, Pass
from ..kept import CacheLayer
from ..state import State
from ..tree import Candidates, Expand, TreeShape
from .frontier import drafting, embeddable
from .head_layer import HeadLayer
from .position_heads import LevelHeads, level_by_level, zeros_unless
from .recurrent import CatchingUp, RecurrentHead
from .shared_noise import BestTokens


class ResidualBlock(nn.Module):
    """A linear layer and what is added to it, which a wide input reaches through another."""

    def __init__(self, width: int, size: int):
        super().__init__()
        self.linear = nn.Linear(width, size)
        self.res_connection: nn.Module = nn.Linear(width, size) if width != size else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.res_connection(x) + nn.functional.silu(self.linear(x))
        return out


class HydraHeads(LevelHeads):
    """The names are those of published checkpoints."""

    def __init__(self, count: int, layers: int, size: int, vocabulary: int, embed: nn.Embedding):
        """embed: the target's embeddings."""
        super().__init__()
        self.count, self.embed = count, embed
        self.hydra_mlp = nn.ModuleList(
            nn.ModuleList(ResidualBlock(size if layer else (level + 2) * size, size) for layer in range(layers))
            for level in range(count)
        )
        self.hydra_lm_head = nn.ModuleList(nn.Linear(size, vocabulary) for _ in range(count))

    def forward(
        self, level: int, tokens: Tensor, parents: Tensor, memory: Tensor, wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        memory = memory.gather(1, parents[:, :, None].expand(-1, -1, memory.shape[2]))
        embedded = self.embed(embeddable(tokens, self.embed.num_embeddings))
        x = memory = zeros_unless(wanted, torch.cat([memory, embedded], -1))
        blocks: Any = self.hydra_mlp[level]
        for block in blocks:
            x = zeros_unless(wanted, block(x))
        return x, memory

    def logits(self, level: int, x: Tensor) -> Tensor:
        logits: Tensor = self.hydra_lm_head[level](x)
        return logits


class PrefixLayer(RecurrentHead):
    """Hydra++'s decoder layer over the target's hidden states alone."""

    def __init__(self, config: LlamaConfig, feature_layer: int):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.config, self.feature_layers, self.width = config, (feature_layer,), size
        self.cache_layer = CacheLayer(config.num_key_value_heads, config.head_dim, config.head_dim)
        self.layer = HeadLayer(config, size, config.attention_bias)
        self.input_layernorm = LlamaRMSNorm(size, eps)
        self.norm = LlamaRMSNorm(size, eps)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, embedded: Tensor, hidden: Tensor, where: Pass, cache: LayerCache) -> tuple[Tensor, Tensor]:
        x, rotary = self.input_layernorm(hidden), self.rotary(hidden, where.positions)
        normed = self.norm(self.layer.run(x, where.outputs_of(hidden), rotary, where, cache))
        return normed, normed


class HydraPlus(CatchingUp):
    """Scores with Hydra's heads over what such a layer makes of the last position."""

    def __init__(self, prefix: PrefixLayer, heads: HydraHeads):
        super().__init__(prefix, heads.embed)
        self.heads, self.most_depth = heads, heads.count

    def begin(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> tuple[Candidates, Expand, State]:
        wanted, root = drafting(state), state["history"].gather(1, state["lengths"][:, None])
        normed, _, lengths = self.catch_up(state, keys, values)
        best = BestTokens(state, shape.top_k, wanted=wanted)
        expand = level_by_level(self.heads, best, normed, wanted, shape.top_k)
        children = expand(root, torch.zeros_like(root)).where(lengths > state["draft_lengths"])
        return children, expand, {"draft_lengths": lengths}
