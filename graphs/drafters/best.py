"""The best of a node's few candidates. Letters: B batch, F frontier nodes, C candidates of a node, K of them.

Everything is pairwise comparison: C is small, and this fuses, where `topk` is a call of its own.
"""

import torch
from torch import Tensor

from ..tree import Candidates

STEPS_PER_NAT = 4096  # scores are multiples of 1/4096: sums are exact, so equal paths tie on every backend


def distinct(candidates: Candidates) -> Candidates:
    """Candidates of which a token that comes twice is one only where it is first."""
    tokens, scores = candidates
    there = scores > float("-inf")
    again = (tokens[:, :, :, None] == tokens[:, :, None]) & there[:, :, None] & _earlier(tokens)
    return Candidates(tokens, scores.masked_fill(again.any(-1), float("-inf")))


def best_of(candidates: Candidates, top_k: int) -> Candidates:
    """The K best of C candidates, the best first, the first among equals; token 0 and -inf where there are fewer."""
    tokens, scores = candidates
    mine, other = scores[:, :, :, None], scores[:, :, None]
    rank = ((other > mine) | ((other == mine) & _earlier(tokens))).sum(-1)  # [B, F, C], each rank once
    chosen = rank[:, :, None] == torch.arange(top_k, device=tokens.device)[:, None]  # [B, F, K, C]
    best = torch.where(chosen, scores[:, :, None], float("-inf")).amax(-1)
    return Candidates((chosen * tokens[:, :, None]).sum(-1).where(best > float("-inf"), 0), best)


def likeliest(tokens: Tensor, probability: Tensor, top_k: int) -> Candidates:
    """The K most probable of C tokens, each once: tokens [B, F, C] int64, -1 where there is none, and their probability
    [B, F, C] float32, 0 for none -> candidates [B, F, K]."""
    found = Candidates(tokens, probability.masked_fill(tokens < 0, 0.0).log())
    return rounded(best_of(distinct(found), top_k))


def rounded(candidates: Candidates) -> Candidates:
    """Scores as multiples of 1 / STEPS_PER_NAT."""
    return Candidates(candidates.tokens, (candidates.log_probs * STEPS_PER_NAT).round() / STEPS_PER_NAT)


def _earlier(tokens: Tensor) -> Tensor:
    """[C, C] whether the second comes before the first."""
    return torch.ones(tokens.shape[2], tokens.shape[2], dtype=torch.bool, device=tokens.device).tril(-1)
