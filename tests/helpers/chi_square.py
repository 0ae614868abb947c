"""The chi-square test, for proofs of distributions: fixed seeds, a threshold that a right rule never meets."""

import math

import torch
from torch import Tensor

LEAST = 1e-9  # a right rule gives a smaller p-value once in so many runs


def p_value(counts: Tensor, probability: Tensor) -> float:
    """How likely counts are that deviate as much, or as little, from these probabilities: two-sided, so what is too
    regular fails as well. Cells that expect fewer than 5 are put together; a cell of probability 0 must be empty."""
    counts, probability = counts.flatten().double(), probability.flatten().double()
    if bool((counts[probability == 0] > 0).any()):
        return 0.0
    expected = probability / probability.sum() * counts.sum()
    rare = expected < 5
    counts, expected = (torch.cat([part[~rare], part[rare].sum(0, keepdim=True)]) for part in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    above, below = (f(half, statistic / 2).item() for f in (torch.special.gammaincc, torch.special.gammainc))
    return 2 * min(above, below)


def uniform(cells: Tensor, count: int) -> float:
    """The p-value of integers below `count` that should be uniform."""
    return p_value(torch.bincount(cells.flatten(), minlength=count), torch.ones(count))


def normal(z: float, tries: int = 1) -> float:
    """The p-value of the largest of so many standard normal numbers, two-sided."""
    return min(1.0, tries * math.erfc(abs(z) / math.sqrt(2)))
