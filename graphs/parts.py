"""Layers whose inputs are cut into parts: the products of the parts are added in their order, as ranks would add them.

A device that computes all parts itself has the bits of as many ranks that compute one each.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from ..kernels.all_reduce.reference import all_reduce


class LinearOfParts(nn.Module):
    """A linear layer as the sum of as many products as its inputs have parts."""

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None):
        """weights: [N, K / R] of each of the R parts, in the order of the inputs; bias: [N], added to the sum."""
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in weights)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        size = self.weights[0].shape[1]
        parts = [x[..., at * size : (at + 1) * size] for at in range(len(self.weights))]
        total = all_reduce([nn.functional.linear(x, w) for x, w in zip(parts, self.weights, strict=True)])
        return total if self.bias is None else total + self.bias


class ExpertsOfParts(nn.Module):
    """The experts of a mixture as the sum of narrower ones: each part has a share of every expert's inner width."""

    def __init__(self, parts: Sequence[nn.Module]):
        """parts: modules of transformers' experts interface."""
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See `experts.mix_experts`."""
        return all_reduce([part(hidden_states, top_k_index, top_k_weights) for part in self.parts])
