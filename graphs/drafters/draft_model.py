"""A smaller causal LM as the drafter, with its own layers in the engine's cache.

Letters: B batch, F frontier nodes, D greatest depth, M nodes already drafted in this step, K candidates.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention import Pass, chain_pass
from ..kept import CacheLayer
from ..state import State, StateTensor
from ..target import CausalLM
from ..tree import Candidates, Expand, TreeShape
from .drafter import Scorer, most_catch_up, owed_positions
from .frontier import FrontierPasses, drafting
from .shared_noise import BestTokens
from .vocabulary import CommonTokens, SameTokens

DRAFT = "draft."  # ahead of the names of what its recurrent layers keep


class DraftModel(Scorer):
    """Scores with a causal LM, of the target's tokenizer or another.

    Its cache holds `draft_lengths` tokens. A step first runs it over the tokens committed since then, the root
    included; that overwrites what rejected drafts left there, so nothing needs to be rewound. Each further level
    processes its new frontier alone, against the cache and the frontiers before it.
    """

    pauses = True
    skippable = True

    def __init__(self, model: CausalLM, layers: list[CacheLayer], tokens: SameTokens | CommonTokens):
        """layers: the model's KV cache. tokens: what the target's are to the model."""
        super().__init__()
        self.model, self.layers, self.tokens = model, layers, tokens

    def cache_layers(self) -> list[CacheLayer]:
        return self.layers

    def state(self, shape: TreeShape) -> dict[str, StateTensor]:
        return {"draft_lengths": StateTensor((), torch.int64)} | {
            f"{DRAFT}{name}": tensor for name, tensor in self.model.states.items()
        }

    def kept(self, state: State) -> State:
        """What the model's recurrent layers keep of the rows, by its own names."""
        return {name: state[f"{DRAFT}{name}"] for name in self.model.states}

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
        self._logits(tokens, where.over(self.kept(state)), keys, values)
        return {"draft_lengths": state["lengths"] + count}

    def begin(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> tuple[Candidates, Expand, State]:
        wanted = drafting(state)
        passes = FrontierPasses(state["lengths"] + 1, wanted, self.kept(state))
        best = BestTokens(state, shape.top_k, self.tokens.ids, wanted)

        def expand(tokens: Tensor, parents: Tensor) -> Candidates:
            return best(self.tokens.draftable(self._logits(tokens, passes.extend(parents), keys, values)))

        logits, lengths = self._catch_up(state, keys, values, most_catch_up(shape))
        children = best(self.tokens.draftable(logits)).where(lengths > state["draft_lengths"])
        return children, expand, {"draft_lengths": lengths}

    def _catch_up(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], most: int
    ) -> tuple[Tensor, Tensor]:
        """Process the tokens since `draft_lengths`, the last ones where they are more than the step says, which is at
        most `most` -> logits [B, 1, V] after the last one, the root, and what `draft_lengths` is now."""
        lengths, wanted = state["lengths"] + 1, drafting(state)
        start, index, last = owed_positions(state, lengths)
        tokens, width = state["history"].gather(1, index), index.shape[1]
        count = (lengths - start).where(wanted, 0)
        where = chain_pass(start, width, most, wanted, state=self.kept(state), count=count)
        logits = self._logits(tokens, where, keys, values)
        after = logits.gather(1, last[:, :, None].expand(-1, -1, logits.shape[2]))
        return after, lengths.where(wanted, state["draft_lengths"])

    def _logits(self, tokens: Tensor, where: Pass, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """The target's token ids [B, T] -> the model's logits [B, T, V]."""
        return self.model(self.tokens.read(tokens), where, keys, values)[0]
