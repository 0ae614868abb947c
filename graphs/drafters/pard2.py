"""PARD-2: PARD over tokens whose embeddings have a share of what the target made of the text.

Source: PARD-2's published inference (AMD-AGI/PARD, pard2_infer.py). The token at position p comes with the target's
hidden states at p - 1, the first one with none; a mask with those of the root.
Letters: B batch, T tokens, C positions to catch up, F width of the features, H the model's hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..attention import Pass
from ..kept import CacheLayer
from ..state import State, StateTensor
from ..target import CausalLM
from ..tree import Candidates, Expand, TreeShape
from .all_depths import with_masks
from .drafter import most_catch_up
from .pard import Pard
from .recurrent import CatchingUp
from .vocabulary import CommonTokens, SameTokens


class Pard2(Pard):
    """Scores as PARD does. The features of the last positions are kept in `recent`, as `CatchingUp` keeps them."""

    def __init__(
        self,
        model: CausalLM,
        layers: list[CacheLayer],
        tokens: SameTokens | CommonTokens,
        mask: int,
        target_proj: nn.Linear,
        scale: float,
        feature_layers: tuple[int, ...],
    ):
        """target_proj: features -> what is added to the embeddings, times `scale`; the rest as for `Pard` and
        `Scorer`."""
        super().__init__(model, layers, tokens, mask)
        self.target_proj, self.scale, self.feature_layers = target_proj, scale, feature_layers

    def state(self, shape: TreeShape) -> dict[str, StateTensor]:
        size = (most_catch_up(shape), self.target_proj.in_features)
        recent = StateTensor(size, self.target_proj.weight.dtype, in_place=True)
        return super().state(shape) | {"recent": recent}

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
        assert features is not None
        start, recent = state["lengths"], state["recent"]
        # Behind a prompt's beginning that came from a prefix cache, as behind nothing, a token comes without features.
        known = (start > 0) & (state["draft_lengths"] == start)
        before = CatchingUp.recalled(recent, start[:, None] - 1).where(known[:, None, None], 0.0)
        shifted = torch.cat([before, features.to(recent.dtype)], 1)[:, :-1]
        self.model(self.tokens.read(tokens), where.over(self.kept(state)), keys, values, self._share(shifted))
        last, end = (count - 1)[:, None, None].expand(-1, 1, features.shape[2]), start + count
        CatchingUp.remember_at(features.gather(1, last), end[:, None] - 1, recent)
        return {"draft_lengths": end}

    def begin(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> tuple[Candidates, Expand, State]:
        features, first = state["features"], state["lengths"] - state["moved"]
        index = first[:, None] + torch.arange(features.shape[1], device=first.device)
        CatchingUp.remember_at(features, index, state["recent"])
        return super().begin(state, keys, values, shape)

    def commit(self, state: State, path: Tensor, features: Tensor | None) -> State:
        assert features is not None
        return {"features": features.gather(1, path[:, :, None].expand(-1, -1, features.shape[2]))}

    def added(self, state: State, index: Tensor, last: Tensor, masks: int, where: Pass) -> Tensor:
        features = CatchingUp.recalled(state["recent"], index - 1).where(index[:, :, None] > 0, 0.0)
        root = features.gather(1, last[:, :, None].expand(-1, -1, features.shape[2]))
        return self._share(where.zeros_unless_wanted(with_masks(features, last, root, masks)))

    def _share(self, features: Tensor) -> Tensor:
        """[B, T, F] -> what is added to embeddings [B, T, H]."""
        return self.target_proj(features) * self.scale
