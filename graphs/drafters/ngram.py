"""An n-gram language model over the row's own history, a prediction of its answer, what the engine wrote before and,
with count tables, a corpus.

It scores the children of every node, not of the root alone, so several continuations become branches. Sources: prompt
lookup decoding (A. Saxena, 2023), here as a scorer that backs off: see `kernels/ngram/reference.py`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...kernels.ngram.learned import WAYS, learn
from ...kernels.ngram.op import ngram
from ..attention import Pass
from ..state import State, StateTensor
from ..tree import Candidates, Expand, TreeShape
from .drafter import Scorer
from .ngram_tables import NgramTables

# Match length -> concentration c: n matches get weight n / (n + c), the backed-off estimate c / (n + c). Those of 1
# and 2 are fitted by likelihood to held-out greedy answers of SmolLM2-135M-Instruct, with the same result with and
# without tables; the fit gives length 3 an infinite concentration, so it is left out (compile/drafters/data/*.md).
# Those of 4 and 8 bring the most tokens per step (bench/LOG.md).
CONCENTRATIONS: Mapping[int, float] = {1: 13.0, 2: 2.0, 4: 0.3, 8: 0.1}

# The weight of a prediction's token by the length of the match ahead of it, from 0 on. Less than it deserves where the
# answer follows it, which costs little: a wrong prediction must not fill the tree (bench/LOG.md).
TRUST = (0.02, 0.1, 0.3, 0.5, 0.7)


class Ngram(Scorer):
    """Scores tokens by the matches of a node's last tokens in its row's history and in the prediction of its answer, by
    what followed them in the engine's answers, and by count tables if given.

    It keeps where in the prediction the answer is: `prediction_offset`, the place of what should follow the root less
    the root's own place in the history. So an answer that goes on beside the prediction is expected back in step.
    """

    neural = False
    skippable = True

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
        self.trust: Tensor
        weights = [TRUST[min(length, len(TRUST) - 1)] for length in range(self.longest + 1)]
        self.register_buffer("trust", torch.tensor(weights))

    def state(self, shape: TreeShape) -> dict[str, StateTensor]:
        return {"prediction_offset": StateTensor((), torch.int64)}

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
        offset = 1 - state["prompt_lengths"]  # an answer begins as its prediction does
        return {"prediction_offset": offset}

    def shared(self) -> dict[str, StateTensor]:
        return {"learned": StateTensor((self.learned_rows + 1, WAYS), torch.int64)} if self.learned_rows else {}

    def begin(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> tuple[Candidates, Expand, State]:
        history, lengths, learned = state["history"], state["lengths"], state["learned"] if self.learned_rows else None
        tables = (None,) * 4 if self.tables is None else self.tables.tensors
        before = lengths[:, None] + torch.arange(-self.longest, 0, device=history.device)
        context = history.gather(1, before.clamp(min=0)).where(before >= 0, -2)[:, None]  # [B, 1, n] ahead of the root
        places = (lengths + state["prediction_offset"] - 1)[:, None]  # [B, F] in the prediction, of what follows a node

        def expand(tokens: Tensor, parents: Tensor) -> Candidates:
            nonlocal context, places
            parent_context = context.gather(1, parents[:, :, None].expand(-1, -1, self.longest))
            context = torch.cat([parent_context[:, :, 1:], tokens[:, :, None]], 2)
            wanted = self.matches, 2 * shape.top_k  # more than K: noise may prefer another one
            expected = places.gather(1, parents) + 1
            given = history, lengths, context, state["prediction"], state["prediction_lengths"], expected
            *scored, places = ngram(*given, self.concentrations, self.trust, *tables, learned, *wanted)
            return Candidates(*scored)

        root = history.gather(1, lengths[:, None])
        children = expand(root, torch.zeros_like(root))
        return children, expand, {"prediction_offset": places[:, 0] - lengths}

    def commit(self, state: State, path: Tensor, features: Tensor | None) -> State:
        if self.learned_rows:
            previous, last, token = state["verified"].unbind(2)
            counts = (state["moved"] * state["learning"] > 0)[:, None]
            learn(state["learned"], previous, last, token, counts & (token >= 0))
        return {}
