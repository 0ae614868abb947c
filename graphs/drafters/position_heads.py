"""Heads over the target's last hidden state, one for each level of the tree: Medusa, and speculators that carry a state
along the path. They attend to nothing, so they have no cache, and keep nothing from step to step.

A head k over the hidden state at position p says what comes at p + 2 + k: the target itself says what comes at p + 1,
which is the root.
Letters: B batch, F frontier nodes, H hidden size, V tokens of the heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..state import State
from ..tree import Candidates, Expand, TreeShape
from .drafter import Scorer
from .frontier import drafting, no_candidates
from .shared_noise import BestTokens


class LevelHeads(nn.Module):
    """What is trained. count: how many levels it can score."""

    count: int

    def forward(
        self, level: int, tokens: Tensor, parents: Tensor, memory: Tensor, wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A level's frontier: tokens [B, F], their parents in the frontier before, and the memory of that, which is the
        target's hidden state [B, 1, H] at level 0, whose frontier is the root -> what the logits of the children are
        computed of, [B, F, ..] or [B, 1, ..] where it is the same for all nodes, and this frontier's memory. wanted
        [1] bool: False for a step without the heads; all of it is zeros then, see `zeros_unless`."""
        raise NotImplementedError

    def logits(self, level: int, x: Tensor) -> Tensor:
        """What `forward` returned first -> logits [B, F, V], or [B, 1, V]."""
        raise NotImplementedError


def zeros_unless(wanted: Tensor, x: Tensor) -> Tensor:
    """x, or zeros where it is not wanted: linear layers of zeros cost nothing (`kernels.linear`)."""
    return x.where(wanted, torch.zeros((), dtype=x.dtype, device=x.device))


def level_by_level(heads: LevelHeads, best: BestTokens, hidden: Tensor, wanted: Tensor, top_k: int) -> Expand:
    """What scores one frontier after the other, the root's first, from the hidden state [B, 1, H] of the last position.
    Deeper levels than there are heads get no candidates."""
    level, memory = 0, zeros_unless(wanted, hidden)

    def expand(tokens: Tensor, parents: Tensor) -> Candidates:
        nonlocal level, memory
        if level >= heads.count:
            return no_candidates(tokens, top_k)
        x, memory = heads(level, tokens, parents, memory, wanted)
        found = best(heads.logits(level, x))
        level += 1
        return Candidates(*(part.expand(-1, tokens.shape[1], -1) for part in found))

    return expand


class PositionHeads(Scorer):
    """Scores with such heads."""

    pauses = True
    skippable = True

    def __init__(self, heads: LevelHeads, feature_layer: int, ids: Tensor | None = None):
        """feature_layer: the index of the target's hidden state; ids [V] int64: what the heads' tokens are called by
        the target, None where they have the target's own."""
        super().__init__()
        self.heads, self.feature_layers, self.most_depth = heads, (feature_layer,), heads.count
        self.ids: Tensor | None
        self.register_buffer("ids", ids)

    def begin(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> tuple[Candidates, Expand, State]:
        wanted, root = drafting(state), state["history"].gather(1, state["lengths"][:, None])
        best = BestTokens(state, shape.top_k, self.ids, wanted)
        expand = level_by_level(self.heads, best, state["hidden"], wanted, shape.top_k)
        return expand(root, torch.zeros_like(root)), expand, {}

    def commit(self, state: State, path: Tensor, features: Tensor | None) -> State:
        return {"hidden": last_committed(state, path, features)}


def last_committed(state: State, path: Tensor, features: Tensor | None) -> Tensor:
    """The features [B, 1, H] of the last position that a step commits, see `Scorer.commit`."""
    assert features is not None
    last = path.gather(1, (state["moved"] - 1).clamp(min=0)[:, None])
    return features.gather(1, last[:, :, None].expand(-1, -1, features.shape[2]))
