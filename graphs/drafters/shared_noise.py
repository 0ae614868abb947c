"""Drafts for sampled rows: the noise that the target will add is known, so candidates are ranked with it.

The target chooses argmax(log p + G), G a function of (seed, position, token). A drafter that ranks by log q alone is
blind to G; one that ranks by log q + G alone trusts q too much. A candidate's score is half of each. Source: Daliri et
al. 2024 (arXiv 2408.07978); the halves and SHARPNESS were measured (bench/LOG.md). Greedy rows are ranked by log q, as
ever.

Letters: B batch, F frontier nodes, C candidates of a node, K of them kept, V vocabulary.
"""

import torch
from torch import Tensor

from ...controls import Sampling
from ...kernels.noise_op import gumbel
from ...kernels.top_log_probs.op import top_log_probs
from ..state import State
from ..tree import Candidates
from .best import best_of, distinct, rounded

SHARPNESS = 0.5  # the temperature of the share of the score that knows the noise


class Ranking:
    """Called with the candidates of one level after the other, the root's first: the K best of each node."""

    def __init__(self, state: State, top_k: int):
        self.top_k = top_k
        self.temperature = Sampling(*state["sampling"].unbind(1)).temperature[:, None, None]
        self.seeds = state["seeds"][:, None, None]
        self.position = state["lengths"][:, None, None] + 1  # of the level's candidates

    def __call__(self, children: Candidates) -> Candidates:
        """Candidates [B, F, C], which may repeat a token -> [B, F, K], scored for the tree."""
        tokens, log_q = children = distinct(children)
        noise = gumbel(self.seeds, self.position, tokens)
        self.position = self.position + 1
        divisor = self.temperature.where(self.temperature > 0, 1.0)
        rest = (1 - log_q.exp().sum(-1, keepdim=True)).clamp(min=1e-6).log() / divisor  # of all other tokens
        plain = _log_share(log_q / divisor, rest)
        noisy = _log_share((log_q / divisor + noise) / SHARPNESS, rest / SHARPNESS)
        sampled = rounded(Candidates(tokens, (plain + noisy) / 2)).log_probs
        return best_of(Candidates(tokens, sampled.where(self.temperature > 0, log_q)), self.top_k)


def _log_share(scores: Tensor, rest: Tensor) -> Tensor:
    """Logarithm of the softmax over candidates [B, F, C] and what is left over [B, F, 1]."""
    return scores - torch.cat([scores, rest], 2).logsumexp(-1, keepdim=True)


class BestTokens:
    """The best tokens of a whole distribution, for one level after the other, the root's candidates first: the K
    likeliest and, for a row that is sampled, the K best with noise."""

    def __init__(self, state: State, top_k: int, ids: Tensor | None = None):
        """ids: [V] int64, what the scorer's tokens are called in the target's vocabulary."""
        self.state, self.top_k, self.ids, self.level = state, top_k, ids, 0

    def __call__(self, logits: Tensor) -> Candidates:
        """logits [B, F, V] -> [B, F, 2 K]; a token may be among them twice."""
        self.level += 1
        batch, width, _ = logits.shape
        nodes = torch.arange(width, device=logits.device).expand(batch, -1)
        temperature = Sampling(*self.state["sampling"].unbind(1)).temperature
        position = (self.state["lengths"] + self.level)[:, None].expand(-1, width)
        every, sampled = torch.ones_like(self.state["seeds"]), (temperature > 0).long()
        found = [
            top_log_probs(logits, nodes, rows, noise, self.state["seeds"], position, self.ids, self.top_k)
            for rows, noise in ((every, torch.zeros_like(temperature)), (sampled, temperature))
        ]
        return Candidates(torch.cat([f[0] for f in found], 2), torch.cat([f[1] for f in found], 2))
