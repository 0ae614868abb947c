"""Prompt lookup: what followed the last tokens when they stood in the prompt or output before.

Every node of the tree asks, not the root alone, so several continuations become branches. Source: prompt lookup
decoding (A. Saxena,
2023), here as a scorer. Letters: B batch, F frontier nodes, S history slots, M matches looked at, K candidates, n
longest n-gram.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..state import State
from ..tree import Candidates, Expand, TreeShape
from .drafter import Scorer

# Weight of a continuation by the length of its match, and the share of such drafts that the target confirms.
WEIGHTS = (0.0, 0.1, 0.35, 1.0, 2.0)
CONFIDENCE = (0.0, 0.2, 0.4, 0.6, 0.8)


class Ngram(Scorer):
    """Scores the continuations of the longest, then latest, matches of a node's last tokens in its row's history."""

    def __init__(self, longest: int = 4, shortest: int = 1, matches: int = 8):
        """Match n-grams of `shortest` to `longest` tokens; weigh the best `matches` places against each other."""
        super().__init__()
        if not 1 <= shortest <= longest < len(WEIGHTS):
            raise ValueError(
                f"ngram: expected 1 <= shortest <= longest <= {len(WEIGHTS) - 1}, got shortest {shortest}, "
                f"longest {longest}"
            )
        self.longest, self.matches = longest, matches
        usable = [index >= shortest for index in range(longest + 1)]
        self.weights: Tensor
        self.confidence: Tensor
        self.register_buffer("weights", torch.tensor(WEIGHTS[: longest + 1]) * torch.tensor(usable), persistent=True)
        self.register_buffer("confidence", torch.tensor(CONFIDENCE[: longest + 1]), persistent=True)

    def begin(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> tuple[Candidates, Expand, State]:
        history = state["history"][:, : keys[0].shape[2]]  # the cost follows the tokens really there
        before = state["lengths"][:, None] + torch.arange(-self.longest, 0, device=history.device)
        context = history.gather(1, before.clamp(min=0)).where(before >= 0, -2)[:, None]  # [B, 1, n] ahead of the root

        def expand(tokens: Tensor, parents: Tensor) -> Candidates:
            nonlocal context
            parent_context = context.gather(1, parents[:, :, None].expand(-1, -1, self.longest))
            context = torch.cat([parent_context[:, :, 1:], tokens[:, :, None]], 2)
            return self._continuations(history, state["lengths"], context, shape.top_k)

        root = history.gather(1, state["lengths"][:, None])
        return expand(root, torch.zeros_like(root)), expand, {}

    def _continuations(self, history: Tensor, lengths: Tensor, context: Tensor, top_k: int) -> Candidates:
        """context [B, F, n], the last tokens up to each node -> what followed them in history [B, S]."""
        slots = history.shape[1]
        length = self._match_lengths(history, lengths, context)
        place = torch.arange(slots, device=history.device)
        key = (length * slots + place).topk(self.matches, dim=2).values  # [B, F, M]: longest first, then latest
        length, place = key // slots, key % slots
        follow = history[:, None].expand(-1, context.shape[1], -1).gather(2, (place + 1).clamp(max=slots - 1))
        weight = self.weights[length]
        same = follow[:, :, :, None] == follow[:, :, None, :]  # [B, F, M, M]
        total = (same * weight[:, :, None]).sum(-1)  # united weight of equal tokens
        earlier = torch.ones_like(same[0, 0]).tril(-1)
        total = total.masked_fill((same & earlier).any(-1), 0.0)
        share = total / total.sum(-1, keepdim=True).clamp(min=1e-9)
        share = share * self.confidence[length[:, :, :1]]
        best, index = share.topk(top_k, dim=2)
        return Candidates(follow.gather(2, index), best.log())

    def _match_lengths(self, history: Tensor, lengths: Tensor, context: Tensor) -> Tensor:
        """[B, F, S]: how many of a node's last tokens stand right before each place, that place included."""
        place = torch.arange(history.shape[1], device=history.device)
        run = (place < lengths[:, None])[:, None]  # a match needs a token after it
        total = torch.zeros_like(context[:, :, :1])
        for back in range(self.longest):
            shifted = torch.nn.functional.pad(history, (back, 0), value=-1)[:, : history.shape[1]]
            run = run & (shifted[:, None] == context[:, :, self.longest - 1 - back, None])
            total = total + run
        return total
