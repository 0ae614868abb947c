"""Drafts for sampled rows: the noise that the target will add is known, so candidates are ranked with it.

Letters: B batch, F frontier nodes, C candidates of a node, K of them kept, V vocabulary.
"""

import torch
from torch import Tensor

from ...controls import Sampling
from ...kernels.rank.op import rank
from ...kernels.top_log_probs.op import top_log_probs
from ..state import State
from ..tree import Candidates


class Ranking:
    """Called with the candidates of one level after the other, the root's first: the K best of each node."""

    def __init__(self, state: State, top_k: int):
        self.state, self.top_k, self.level = state, top_k, 0

    def __call__(self, children: Candidates) -> Candidates:
        """Candidates [B, F, C], which may repeat a token -> [B, F, K], scored for the tree. See `rank`."""
        self.level += 1
        temperature = Sampling(*self.state["sampling"].unbind(1)).temperature
        position = self.state["lengths"] + self.level
        return Candidates(*rank(*children, temperature, self.state["seeds"], position, self.top_k))


class BestTokens:
    """The best tokens of a whole distribution, for one level after the other, the root's candidates first: the K
    likeliest and, for a row that is sampled, the K best with noise."""

    def __init__(self, state: State, top_k: int, ids: Tensor | None = None, wanted: Tensor | None = None):
        """ids: [V] int64, what the scorer's tokens are called in the target's vocabulary; wanted [1] bool: False for no
        candidates at all."""
        self.state, self.top_k, self.ids, self.level = state, top_k, ids, 0
        every = torch.ones_like(state["seeds"])
        self.wanted = every if wanted is None else every * wanted

    def __call__(self, logits: Tensor) -> Candidates:
        """logits [B, F, V] -> [B, F, 2 K]; a token may be among them twice."""
        self.level += 1
        batch, width, _ = logits.shape
        nodes = torch.arange(width, device=logits.device).expand(batch, -1)
        temperature = Sampling(*self.state["sampling"].unbind(1)).temperature
        position = (self.state["lengths"] + self.level)[:, None].expand(-1, width)
        plain, noisy = (self.wanted, temperature * 0), (self.wanted * (temperature > 0), temperature)
        found = [
            top_log_probs(logits, nodes, rows, noise, self.state["seeds"], position, self.ids, self.top_k)
            for rows, noise in (plain, noisy)
        ]
        return Candidates(torch.cat([f[0] for f in found], 2), torch.cat([f[1] for f in found], 2))
