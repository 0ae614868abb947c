"""A smaller causal LM as the drafter, with its own layers in the engine's cache.

Letters: B batch, F frontier nodes, D greatest depth, M nodes already drafted in this step, K candidates.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention import Pass, chain_pass
from ..state import State, StateTensor
from ..target import CacheLayer, CausalLM
from ..tree import Candidates, Expand, TreeShape
from .drafter import Scorer


class DraftModel(Scorer):
    """Scores with a causal LM that shares the target's vocabulary.

    Its cache holds `draft_lengths` tokens. A step first runs it over the tokens committed since then, the root
    included,
    which also overwrites whatever rejected drafts left there; nothing needs to be rewound. Each further level processes
    its new frontier alone, against the cache and the frontiers before it.
    """

    def __init__(self, model: CausalLM, layers: list[CacheLayer], vocabulary: int):
        """vocabulary: the target's; logits past it (rows that pad the head of one family member) are never drafted."""
        super().__init__()
        self.model, self.layers, self.vocabulary = model, layers, vocabulary

    def cache_layers(self) -> list[CacheLayer]:
        return self.layers

    def state(self, shape: TreeShape) -> dict[str, StateTensor]:
        return {"draft_lengths": StateTensor((), torch.int64)}

    def prefill(
        self,
        tokens: Tensor,
        count: Tensor,
        state: State,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        features: Tensor | None,
    ) -> State:
        self.model(tokens, chain_pass(state["draft_lengths"], tokens.shape[1]), keys, values)
        return {"draft_lengths": state["draft_lengths"] + count}

    def begin(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> tuple[Expand, State]:
        return _Growth(self, state, keys, values, shape), {"draft_lengths": state["lengths"] + 1}


class _Growth:
    """The draft passes of one step. `ancestors` [B, F, M] and `depths` [M] describe the nodes drafted so far."""

    def __init__(
        self, scorer: DraftModel, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ):
        self.model, self.vocabulary = scorer.model, scorer.vocabulary
        self.state, self.keys, self.values, self.shape = state, keys, values, shape
        self.committed = state["lengths"] + 1  # the root is in the draft cache once it was processed
        self.level, self.drafted = 0, 0

    def __call__(self, tokens: Tensor, parents: Tensor) -> Candidates:
        logits = self._catch_up() if self.level == 0 else self._extend(tokens, parents)
        self.level += 1
        log_probs, tokens = logits[..., : self.vocabulary].float().log_softmax(-1).topk(self.shape.top_k, dim=-1)
        return Candidates(tokens, log_probs)

    def _catch_up(self) -> Tensor:
        """Process the tokens since `draft_lengths`, at most D + 1 -> logits [B, 1, V] after the root."""
        start, history = self.state["draft_lengths"], self.state["history"]
        index = start[:, None] + torch.arange(self.shape.depth + 1, device=start.device)
        tokens = history.gather(1, index)
        logits, _ = self.model(tokens, chain_pass(start, tokens.shape[1]), self.keys, self.values)
        last = (self.state["lengths"] - start).clamp(min=0)
        return logits.gather(1, last[:, None, None].expand(-1, 1, logits.shape[2]))

    def _extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Process one frontier [B, F] -> logits [B, F, V]."""
        batch, width = tokens.shape
        own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
        if self.level == 1:
            self.ancestors, self.depths = own, torch.zeros_like(tokens)
        else:
            inherited = self.ancestors.gather(1, parents[:, :, None].expand(-1, -1, self.drafted))
            self.ancestors = torch.cat([inherited, own], 2)
            self.depths = torch.cat([self.depths, torch.full_like(tokens, self.level - 1)], 1)
        where = Pass(self.committed, self.depths[:, self.drafted :], self.ancestors, self.depths, self.drafted)
        self.drafted += width
        logits, _ = self.model(tokens, where, self.keys, self.values)
        return logits
