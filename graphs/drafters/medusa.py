"""Medusa: a residual block and a head of its own for each position, whatever lies between.

Source: Medusa (arXiv 2401.10774).
"""

from torch import Tensor, nn

from .position_heads import LevelHeads, zeros_unless


class ResidualBlock(nn.Module):
    """Linear layers, each of whose outputs is added to what it took."""

    def __init__(self, layers: int, size: int, bias: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=bias) for _ in range(layers))

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        """wanted: see `LevelHeads`."""
        for layer in self.layers:
            x = zeros_unless(wanted, x + nn.functional.silu(layer(x)))
        return x


class MedusaHeads(LevelHeads):
    """The names are those that vLLM has."""

    def __init__(self, count: int, layers: int, size: int, vocabulary: int, bias: bool):
        super().__init__()
        self.count = count
        self.blocks = nn.ModuleList(ResidualBlock(layers, size, bias) for _ in range(count))
        self.lm_heads = nn.ModuleList(nn.Linear(size, vocabulary, bias=False) for _ in range(count))

    def forward(
        self, level: int, tokens: Tensor, parents: Tensor, memory: Tensor, wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.blocks[level](memory, wanted), memory

    def logits(self, level: int, x: Tensor) -> Tensor:
        logits: Tensor = self.lm_heads[level](x)
        return logits
