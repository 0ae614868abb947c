"""No drafting: plain decoding through the same step, with the bare root as its tree."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..state import State
from ..tree import Candidates, Expand, TreeShape
from .drafter import Scorer


class NoDraft(Scorer):
    """The scorer of a tree of depth 0: no candidates. A step calls `begin` all the same; `expand` never."""

    neural = False
    skippable = True

    def begin(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> tuple[Candidates, Expand, State]:
        def expand(tokens: Tensor, parents: Tensor) -> Candidates:
            nothing = tokens[:, :, None].expand(-1, -1, shape.top_k)
            return Candidates(nothing, torch.full_like(nothing, float("-inf"), dtype=torch.float32))

        root = state["lengths"][:, None]
        return expand(root, root), expand, {}
