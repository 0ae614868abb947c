"""PARD: a draft model that was trained to say all depths in one pass.

Source: PARD (arXiv 2504.18583). Behind the root stand copies of a mask token. As ever, the logits at a token are those
of the token after it: the root's say depth 1, the first mask's depth 2, and so on.
Letters: B batch, D greatest depth, V vocabulary.
"""

from collections.abc import Sequence

from torch import Tensor

from ..attention import Pass, chain_pass
from ..kept import CacheLayer
from ..state import State
from ..target import CausalLM
from ..tree import Candidates, Expand, TreeShape
from .all_depths import begun, masks_behind, of_depths, with_masks
from .draft_model import DraftModel
from .drafter import most_catch_up, owed_positions
from .frontier import drafting
from .shared_noise import BestTokens
from .vocabulary import CommonTokens, SameTokens


class Pard(DraftModel):
    """Scores with a causal LM and its mask token: one pass over the tokens committed since the last, with masks behind
    the root. All nodes of a depth have the same candidates, for the pass knows no path.

    What masks leave in the cache lies behind the committed tokens, where the next step writes.
    """

    all_at_once = True

    def __init__(self, model: CausalLM, layers: list[CacheLayer], tokens: SameTokens | CommonTokens, mask: int):
        """mask: the mask token's id in the model's own vocabulary; the rest as for `DraftModel`."""
        super().__init__(model, layers, tokens)
        self.mask = mask

    def begin(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> tuple[Candidates, Expand, State]:
        best = BestTokens(state, shape.top_k, self.tokens.ids, drafting(state))
        logits, lengths = self._all_depths(state, keys, values, shape)
        levels = [best(self.tokens.draftable(depth)) for depth in logits.split(1, 1)]
        return *begun(levels, lengths > state["draft_lengths"], shape.top_k), {"draft_lengths": lengths}

    def _all_depths(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> tuple[Tensor, Tensor]:
        """Process the tokens since `draft_lengths`, the last ones where they are more than the step says, and masks ->
        logits [B, D, V] of the depths, and what `draft_lengths` is now."""
        lengths, wanted, masks = state["lengths"] + 1, drafting(state), masks_behind(shape)
        start, index, last = owed_positions(state, lengths)
        tokens = with_masks(self.tokens.read(state["history"].gather(1, index)), last, self.mask, masks)
        most, count = most_catch_up(shape) + masks, (lengths - start).where(wanted, 0)
        where = chain_pass(start, tokens.shape[1], most, wanted, state=self.kept(state), count=count)
        added = self.added(state, index, last, masks, where)
        logits = of_depths(self.model(tokens, where, keys, values, added)[0], last, masks)
        return logits, lengths.where(wanted, state["draft_lengths"])

    def added(self, state: State, index: Tensor, last: Tensor, masks: int, where: Pass) -> Tensor | None:
        """What is added to the embeddings [B, C + masks, H] of the tokens at positions [B, C], of which `last` [B, 1]
        is the root's, and of the masks behind it; None for nothing."""
        return None
