"""The best of a node's few candidates. Letters: B batch, F frontier nodes, C candidates of a node, K of them."""

import torch
from torch import Tensor

from ...kernels.rank.op import rank
from ...kernels.rank.reference import STEPS_PER_NAT
from ..tree import Candidates


def best_of(candidates: Candidates, top_k: int) -> Candidates:
    """The K best of C candidates by their own scores, each token once, the first among equals; token 0 and -inf where
    there are fewer."""
    greedy = torch.zeros_like(candidates.tokens[:, 0, 0])
    return Candidates(*rank(*candidates, greedy.float(), greedy, greedy, top_k))


def likeliest(tokens: Tensor, probability: Tensor, top_k: int) -> Candidates:
    """The K most probable of C tokens, each once: tokens [B, F, C] int64, -1 where there is none, and their probability
    [B, F, C] float32, 0 for none -> candidates [B, F, K]."""
    return rounded(best_of(Candidates(tokens, probability.masked_fill(tokens < 0, 0.0).log()), top_k))


def rounded(candidates: Candidates) -> Candidates:
    """Scores as multiples of 1 / STEPS_PER_NAT: sums are exact, so equal paths tie on every backend."""
    return Candidates(candidates.tokens, (candidates.log_probs * STEPS_PER_NAT).round() / STEPS_PER_NAT)
