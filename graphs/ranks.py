"""Layers of which each rank has a share, in a process of its own: ops of ours exchange what the ranks compute."""

import torch
from torch import Tensor, nn

from ..kernels.all_gather.op import all_gather
from ..kernels.all_reduce.op import all_reduce


class LinearOfRank(nn.Module):
    """A rank's product of a linear layer whose inputs are cut, added to those of the others: `parts.LinearOfParts`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, ranks: int):
        """weight: [N, K / R] of this rank; bias: [N], added to the sum."""
        super().__init__()
        self.weight, self.ranks = nn.Parameter(weight, requires_grad=False), ranks
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K / R] of this rank -> [..., N], the same on all."""
        total = all_reduce(nn.functional.linear(x, self.weight), self.ranks)
        return total if self.bias is None else total + self.bias


class ExpertsOfRank(nn.Module):
    """A rank's share of every expert of a mixture: `parts.ExpertsOfParts`."""

    def __init__(self, part: nn.Module, ranks: int):
        """part: a module of transformers' experts interface."""
        super().__init__()
        self.part, self.ranks = part, ranks

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See `experts.mix_experts`."""
        return all_reduce(self.part(hidden_states, top_k_index, top_k_weights), self.ranks)


class HeadOfRank(nn.Module):
    """A rank's share of a model's head: the logits of some tokens, put beside those of the others."""

    def __init__(self, weight: Tensor, bias: Tensor | None, ranks: int, vocab_size: int):
        """weight: [N, K] of this rank, whose first token is rank * N; the last rank's N tokens end the vocabulary,
        and may begin among those of the rank before."""
        super().__init__()
        self.weight, self.ranks, self.vocab_size = nn.Parameter(weight, requires_grad=False), ranks, vocab_size
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., V], the same on all ranks."""
        gathered = all_gather(nn.functional.linear(x, self.weight, self.bias), self.ranks)
        twice = gathered.shape[-1] - self.vocab_size
        if not twice:
            return gathered
        last = gathered.shape[-1] - self.weight.shape[0]
        return torch.cat([gathered[..., :last], gathered[..., last + twice :]], -1)
