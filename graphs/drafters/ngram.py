"""An n-gram language model over the row's own history and, with count tables, over a corpus.

It scores the children of every node, not of the root alone, so several continuations become branches. Sources: prompt
lookup decoding (A. Saxena, 2023), here as a scorer; longer matches back off to shorter ones and to the tables as in a
hierarchical Dirichlet language model (MacKay and Peto, 1995), so that a score is a probability and scores of different
nodes compare.

Letters: B batch, F frontier nodes, S history slots, n longest match, M matches looked at, E table entries of a row,
C = M + E candidates, K of them returned.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..state import State
from ..tree import Candidates, Expand, TreeShape
from .best import likeliest
from .drafter import Scorer
from .ngram_tables import NgramTables

# Match length -> concentration c: n matches get weight n / (n + c), the backed-off estimate c / (n + c). Fitted by
# likelihood to held-out greedy answers of SmolLM2-135M-Instruct, with the same result with and without tables; the fit
# gives length 3 an infinite concentration, so it is left out (measurements: compile/drafters/data/*.md).
CONCENTRATIONS: Mapping[int, float] = {1: 13.0, 2: 2.0, 4: 0.53}


class Ngram(Scorer):
    """Scores tokens by the matches of a node's last tokens in its row's history, and by count tables if given."""

    neural = False

    def __init__(
        self,
        tables: NgramTables | None = None,
        concentrations: Mapping[int, float] = CONCENTRATIONS,
        matches: int = 4,
    ):
        """tables: counts of a corpus; None uses the history alone. concentrations: see CONCENTRATIONS. matches: how
        many places of the history to use, the longest matches first, then the latest. Raises ValueError for match
        lengths or matches below 1 and concentrations that are not positive."""
        super().__init__()
        if not concentrations or min(concentrations) < 1 or min(concentrations.values()) <= 0 or matches < 1:
            raise ValueError(
                "ngram: expected match lengths of at least 1 with positive concentrations and at least 1 match, got "
                f"concentrations {dict(concentrations)}, matches {matches}"
            )
        self.tables, self.matches = tables, matches
        self.concentrations = dict(sorted(concentrations.items()))
        self.longest = max(2, *concentrations)  # trigram tables are looked up by two tokens

    def begin(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> tuple[Candidates, Expand, State]:
        history = state["history"]
        before = state["lengths"][:, None] + torch.arange(-self.longest, 0, device=history.device)
        context = history.gather(1, before.clamp(min=0)).where(before >= 0, -2)[:, None]  # [B, 1, n] ahead of the root

        def expand(tokens: Tensor, parents: Tensor) -> Candidates:
            nonlocal context
            parent_context = context.gather(1, parents[:, :, None].expand(-1, -1, self.longest))
            context = torch.cat([parent_context[:, :, 1:], tokens[:, :, None]], 2)
            return self._score(history, state["lengths"], context, 2 * shape.top_k)  # noise may prefer another one

        root = history.gather(1, state["lengths"][:, None])
        return expand(root, torch.zeros_like(root)), expand, {}

    def _score(self, history: Tensor, lengths: Tensor, context: Tensor, top_k: int) -> Candidates:
        """context [B, F, n], the last tokens up to each node -> the likeliest next tokens [B, F, K]."""
        length, follow = self._matches(history, lengths, context)
        tokens, probability = follow.where(length > 0, -1), torch.zeros_like(follow, dtype=torch.float32)
        if self.tables is not None:
            entries, table_probability = self.tables(context[:, :, -2], context[:, :, -1])
            tokens = torch.cat([tokens, entries], 2)  # [B, F, C]
            probability = ((tokens[:, :, :, None] == entries[:, :, None]) * table_probability[:, :, None]).sum(-1)
        same = tokens[:, :, :, None] == follow[:, :, None]  # [B, F, C, M]
        for least, concentration in self.concentrations.items():
            matched = length >= least  # [B, F, M]
            count, total = (same & matched[:, :, None]).sum(-1), matched.sum(-1, keepdim=True)
            probability = (count + concentration * probability) / (total + concentration)
        return likeliest(tokens, probability, top_k)

    def _matches(self, history: Tensor, lengths: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """The M longest, then latest, matches of each node's context -> their lengths and the tokens that follow them,
        both [B, F, M] int64."""
        slots = history.shape[1]
        key = self._match_keys(history.int(), lengths, context.int())
        best = [key.amax(2, keepdim=True)]
        while len(best) < self.matches:  # each pass a fused reduction: `topk` over the slots takes longer than all
            best.append(key.where(key < best[-1], -1).amax(2, keepdim=True))
        found = torch.cat(best, 2).long()
        length, place = found // slots, found % slots
        follow = history[:, None].expand(-1, context.shape[1], -1).gather(2, (place + 1).clamp(max=slots - 1))
        return length, follow

    def _match_keys(self, history: Tensor, lengths: Tensor, context: Tensor) -> Tensor:
        """Sort keys of the matches [B, F, S] int32, all different: S times the length of the match that ends at a
        place, plus the place."""
        slots = history.shape[1]
        place = torch.arange(slots, device=history.device, dtype=torch.int32)
        run = (place < lengths[:, None])[:, None]  # a match needs a token after it
        total = torch.zeros_like(context[:, :, :1])
        for back in range(self.longest):
            shifted = torch.nn.functional.pad(history, (back, 0), value=-1)[:, :slots]
            run = run & (shifted[:, None] == context[:, :, self.longest - 1 - back, None])
            total = total + run
        return total * slots + place
