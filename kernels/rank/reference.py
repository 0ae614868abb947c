"""The best of a node's candidates, in plain torch: the specification, and what torch runs without a kernel.

The target chooses argmax(log p + G), G a function of (seed, position, token). A drafter that ranks by log q alone is
blind to G; one that ranks by log q + G alone trusts q too much. A candidate's score is half of each. Source: Daliri et
al. 2024 (arXiv 2408.07978); the halves and SHARPNESS were measured (bench/LOG.md). Greedy rows are ranked by log q.

Everything is pairwise comparison: candidates are few.
"""

import torch
from torch import Tensor

from ..noise import gumbel

SHARPNESS = 0.5  # the temperature of the share of the score that knows the noise
STEPS_PER_NAT = 4096  # scores are multiples of 1/4096: sums are exact, so equal paths tie on every backend
LEAST_REST = 1e-6  # of the probability that is left to other tokens


def rank(
    tokens: Tensor, log_probs: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    """The `top_k` best of each node's candidates, each token once, the best first, the first among equals.

    Args:
        tokens: int64 [B, F, C], log_probs: float32 [B, F, C], -inf where there is no candidate; NaN and inf are
            none, either. A token that comes twice counts where it is first.
        temperature: float32 [B], 0 for a greedy row. seeds: int64 [B], not negative. positions: int64 [B], where the
            candidates would stand.

    Returns:
        tokens int64 and scores float32 [B, F, top_k]; token 0 and -inf where there are fewer.
    """
    log_q = _once(tokens, log_probs)
    warm = (temperature > 0)[:, None, None]
    divisor = torch.where(warm, temperature[:, None, None], 1.0)
    rest = (1 - log_q.exp().sum(-1, keepdim=True)).clamp(min=LEAST_REST).log() / divisor  # of all other tokens
    plain = _log_share(log_q / divisor, rest)
    noise = gumbel(seeds[:, None, None], positions[:, None, None], tokens)
    noisy = _log_share((log_q / divisor + noise) / SHARPNESS, rest / SHARPNESS)
    sampled = ((plain + noisy) / 2 * STEPS_PER_NAT).round() / STEPS_PER_NAT
    return _best(tokens, torch.where(warm, sampled, log_q), top_k)


def _once(tokens: Tensor, log_probs: Tensor) -> Tensor:
    """log_probs, -inf where it is no number below infinity, and where the token has come before."""
    log_probs = log_probs.where(log_probs < float("inf"), float("-inf"))
    there = log_probs > float("-inf")
    again = (tokens[:, :, :, None] == tokens[:, :, None]) & there[:, :, None] & _earlier(tokens)
    return log_probs.masked_fill(again.any(-1), float("-inf"))


def _log_share(scores: Tensor, rest: Tensor) -> Tensor:
    """Logarithm of the softmax over candidates [B, F, C] and what is left over [B, F, 1]."""
    return scores - torch.cat([scores, rest], 2).logsumexp(-1, keepdim=True)


def _best(tokens: Tensor, scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    mine, other = scores[:, :, :, None], scores[:, :, None]
    place = ((other > mine) | ((other == mine) & _earlier(tokens))).sum(-1)  # [B, F, C], each place once
    chosen = place[:, :, None] == torch.arange(top_k, device=tokens.device)[:, None]  # [B, F, K, C]
    best = torch.where(chosen, scores[:, :, None], float("-inf")).amax(-1)
    return (chosen * tokens[:, :, None]).sum(-1).where(best > float("-inf"), 0), best


def _earlier(tokens: Tensor) -> Tensor:
    """[C, C] whether the second comes before the first."""
    return torch.ones(tokens.shape[2], tokens.shape[2], dtype=torch.bool, device=tokens.device).tril(-1)
