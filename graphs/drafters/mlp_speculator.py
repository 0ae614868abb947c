"""mlp_speculator: a state that takes in one token of the path after the other, and a head for each level.

Source: arXiv 2404.19124. Letters: B batch, F frontier nodes.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .frontier import embeddable
from .position_heads import LevelHeads, zeros_unless

EPSILON = 1e-6


@dataclass(frozen=True)
class MlpSpeculatorConfig:
    """The architecture."""

    levels: int  # tokens ahead, a head each
    hidden_size: int  # of the target
    inner_size: int  # width of the state along the path
    vocabulary: int  # rows of embeddings and heads
    tied: bool  # all levels share their tensors, but for the first projection
    scale_input: bool  # the target's hidden state is normed and halved in energy


class ShiftedNorm(nn.Module):
    """An RMS norm with a bias."""

    def __init__(self, size: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * root_mean_square(x) + self.bias


def root_mean_square(x: Tensor) -> Tensor:
    """x over the root of the mean of its squares."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)).to(x.dtype)


class MlpSpeculator(LevelHeads):
    """The names are those of published checkpoints; where levels are tied, the first has the tensors of all."""

    def __init__(self, config: MlpSpeculatorConfig):
        super().__init__()
        self.config, self.count, own = config, config.levels, 1 if config.tied else config.levels
        inner, projections = config.inner_size, min(config.levels, 2) if config.tied else config.levels
        self.emb = nn.ModuleList(nn.Embedding(config.vocabulary, inner) for _ in range(own))
        self.proj = nn.ModuleList(
            nn.Linear(inner if level else config.hidden_size, inner, bias=False) for level in range(projections)
        )
        self.ln = nn.ModuleList(ShiftedNorm(inner) for _ in range(own))
        self.head = nn.ModuleList(nn.Linear(inner, config.vocabulary, bias=False) for _ in range(own))
        state = 0.5 ** (0.5 / config.levels)  # how much of the state is left at each level
        self.share = math.sqrt((1 - state**2) * (inner / 2)) / state

    def forward(
        self, level: int, tokens: Tensor, parents: Tensor, memory: Tensor, wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        if level == 0 and self.config.scale_input:
            memory = root_mean_square(memory) / math.sqrt(2)
        own = self._own(level)
        memory = memory.gather(1, parents[:, :, None].expand(-1, -1, memory.shape[2]))
        embedded = self.emb[own](embeddable(tokens, self.config.vocabulary))
        mixed = self.proj[min(level, len(self.proj) - 1)](memory) + self.share * embedded
        state = zeros_unless(wanted, nn.functional.gelu(self.ln[own](mixed)))
        return state, state

    def logits(self, level: int, x: Tensor) -> Tensor:
        logits: Tensor = self.head[self._own(level)](x)
        return logits

    def _own(self, level: int) -> int:
        """Which of the tensors a level has."""
        return min(level, len(self.head) - 1)
