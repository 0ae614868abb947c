"""An n-gram language model over the row's own history, what the engine wrote before and, with count tables, a corpus.

It scores the children of every node, not of the root alone, so several continuations become branches. Sources: prompt
lookup decoding (A. Saxena, 2023), here as a scorer that backs off: see `kernels/ngram/reference.py`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...kernels.ngram.learned import WAYS, learn
from ...kernels.ngram.op import ngram
from ..state import State, StateTensor
from ..tree import Candidates, Expand, TreeShape
from .drafter import Scorer
from .ngram_tables import NgramTables

# Match length -> concentration c: n matches get weight n / (n + c), the backed-off estimate c / (n + c). Fitted by
# likelihood to held-out greedy answers of SmolLM2-135M-Instruct, with the same result with and without tables; the fit
# gives length 3 an infinite concentration, so it is left out (measurements: compile/drafters/data/*.md).
CONCENTRATIONS: Mapping[int, float] = {1: 13.0, 2: 2.0, 4: 0.53}


class Ngram(Scorer):
    """Scores tokens by the matches of a node's last tokens in its row's history, by what followed them in the engine's
    answers, and by count tables if given."""

    neural = False

    def __init__(
        self,
        tables: NgramTables | None = None,
        concentrations: Mapping[int, float] = CONCENTRATIONS,
        matches: int = 4,
        learned_rows: int = 0,
    ):
        """tables: counts of a corpus, or None. learned_rows: of the table in which the engine counts what it writes,
        16 entries each (`kernels/ngram/learned.py`); 0 for none. concentrations: see CONCENTRATIONS. matches: how
        many places of the history to use, the longest matches first, then the latest. Raises ValueError for match
        lengths or matches below 1 and concentrations that are not positive."""
        super().__init__()
        if learned_rows < 0:
            raise ValueError(f"ngram: learned_rows: expected 0 or more, got {learned_rows}")
        if not concentrations or min(concentrations) < 1 or min(concentrations.values()) <= 0 or matches < 1:
            raise ValueError(
                "ngram: expected match lengths of at least 1 with positive concentrations and at least 1 match, got "
                f"concentrations {dict(concentrations)}, matches {matches}"
            )
        self.tables, self.matches, self.learned_rows = tables, matches, learned_rows
        self.longest = max(2, *concentrations)  # trigram tables are looked up by two tokens
        self.concentrations: Tensor
        values = [concentrations.get(length, 0.0) for length in range(1, self.longest + 1)]
        self.register_buffer("concentrations", torch.tensor(values))

    def shared(self) -> dict[str, StateTensor]:
        return {"learned": StateTensor((self.learned_rows + 1, WAYS), torch.int64)} if self.learned_rows else {}

    def begin(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> tuple[Candidates, Expand, State]:
        history, learned = state["history"], state["learned"] if self.learned_rows else None
        if learned is not None:
            learn(learned, history, state["lengths"], state["moved"] * state["learning"], shape.depth + 1)
        tables = (None,) * 4 if self.tables is None else self.tables.tensors
        before = state["lengths"][:, None] + torch.arange(-self.longest, 0, device=history.device)
        context = history.gather(1, before.clamp(min=0)).where(before >= 0, -2)[:, None]  # [B, 1, n] ahead of the root

        def expand(tokens: Tensor, parents: Tensor) -> Candidates:
            nonlocal context
            parent_context = context.gather(1, parents[:, :, None].expand(-1, -1, self.longest))
            context = torch.cat([parent_context[:, :, 1:], tokens[:, :, None]], 2)
            wanted = self.matches, 2 * shape.top_k  # more than K: noise may prefer another one
            sources = self.concentrations, *tables, learned
            return Candidates(*ngram(history, state["lengths"], context, *sources, *wanted))

        root = history.gather(1, state["lengths"][:, None])
        return expand(root, torch.zeros_like(root)), expand, {}
