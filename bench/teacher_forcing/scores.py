"""What a model says about given tokens, position by position."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Scores(NamedTuple):
    """losses: [N] float64, the negative log-likelihood of each token but the first of its sequence. greedy: [N] int64,
    the token that the model would have written there."""

    losses: Tensor
    greedy: Tensor

    @property
    def perplexity(self) -> float:
        return float(self.losses.mean().exp())


def score(logits: Tensor, ids: Sequence[int]) -> Scores:
    """logits: [T, V] after each of T tokens, in any dtype."""
    rows, following = logits[: len(ids) - 1], torch.tensor(ids[1:])
    losses = [
        torch.nn.functional.cross_entropy(part.float(), wanted, reduction="none")
        for part, wanted in zip(rows.split(128), following.split(128), strict=True)
    ]
    return Scores(torch.cat(losses).double(), rows.argmax(-1))


def joined(parts: Sequence[Scores]) -> Scores:
    """Those of all sequences, one after the other."""
    return Scores(torch.cat([part.losses for part in parts]), torch.cat([part.greedy for part in parts]))


class Difference(NamedTuple):
    """One variant against another on the same tokens. change: of the perplexity, 0.01 for one that is 1% higher.
    error: its standard error, from the differences of the losses token by token. agreement: share of positions with
    the same greedy token."""

    change: float
    error: float
    agreement: float


def difference(scores: Scores, other: Scores) -> Difference:
    """How much worse `scores` is than `other`."""
    apart = scores.losses - other.losses
    ratio = float(apart.mean().exp())
    error = ratio * float(apart.std()) / apart.numel() ** 0.5
    return Difference(ratio - 1, error, float((scores.greedy == other.greedy).double().mean()))
