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
from .frontier import FrontierPasses, embeddable
from .shared_noise import BestTokens


class DraftModel(Scorer):
    """Scores with a causal LM that shares the target's vocabulary.

    Its cache holds `draft_lengths` tokens. A step first runs it over the tokens committed since then, the root
    included; that overwrites what rejected drafts left there, so nothing needs to be rewound. Each further level
    processes its new frontier alone, against the cache and the frontiers before it.
    """

    def __init__(self, model: CausalLM, layers: list[CacheLayer], vocabulary: int):
        """layers: the model's KV cache. vocabulary: the target's; logits past it (padding of the model's own head) are
        never drafted."""
        super().__init__()
        self.model, self.layers, self.vocabulary = model, layers, vocabulary
        self.known: int = model.model.get_input_embeddings().num_embeddings

    def cache_layers(self) -> list[CacheLayer]:
        return self.layers

    def state(self, shape: TreeShape) -> dict[str, StateTensor]:
        return {"draft_lengths": StateTensor((), torch.int64)}

    def prefill(
        self,
        tokens: Tensor,
        count: Tensor,
        where: Pass,
        state: State,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        features: Tensor | None,
    ) -> State:
        self._logits(tokens, where, keys, values)
        return {"draft_lengths": state["lengths"] + count}

    def begin(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> tuple[Candidates, Expand, State]:
        passes, best = FrontierPasses(state["lengths"] + 1), BestTokens(state, shape.top_k)

        def expand(tokens: Tensor, parents: Tensor) -> Candidates:
            return best(self._logits(tokens, passes.extend(parents), keys, values)[..., : self.vocabulary])

        children = best(self._catch_up(state, keys, values, shape.depth)[..., : self.vocabulary])
        return children, expand, {"draft_lengths": state["lengths"] + 1}

    def _catch_up(self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], depth: int) -> Tensor:
        """Process the tokens since `draft_lengths`, at most D + 1 -> logits [B, 1, V] after the root."""
        start = state["draft_lengths"]
        index = start[:, None] + torch.arange(depth + 1, device=start.device)
        tokens = state["history"].gather(1, index)
        logits = self._logits(tokens, chain_pass(start, depth + 1, depth + 1), keys, values)
        last = (state["lengths"] - start).clamp(min=0)
        return logits.gather(1, last[:, None, None].expand(-1, 1, logits.shape[2]))

    def _logits(self, tokens: Tensor, where: Pass, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """The target's token ids [B, T] -> the model's logits [B, T, V]."""
        return self.model(embeddable(tokens, self.known), where, keys, values)[0]
