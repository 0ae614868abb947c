"""A drafter: a scorer of next tokens and the shape of the tree that is grown from its scores."""

from collections.abc import Sequence

from torch import Tensor, nn

from ..attention import Pass
from ..state import State, StateTensor
from ..target import CacheLayer
from ..tree import Candidates, DraftTree, Expand, TreeShape


class Scorer(nn.Module):
    """What a drafting method implements. The defaults are those of a method that keeps nothing between steps.

    `begin` returns the candidates after the root, a function that scores one further frontier after the other
    (`tree.Expand`), and the scorer's own next state. Scorers with a KV cache declare its layers; they sit after the
    target's. `neural` says that a level costs a pass over weights.
    """

    neural = True
    feature_layers: tuple[int, ...] = ()

    def cache_layers(self) -> list[CacheLayer]:
        """KV layers of the scorer's own, in order."""
        return []

    def state(self, shape: TreeShape) -> dict[str, StateTensor]:
        """State tensors of the scorer's own, by name."""
        return {}

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
        """Take in a prompt chunk (see `Prefill.forward`; `where` is the target's pass over it, features [1, T, ...]
        are its features) -> own next state."""
        return {}

    def begin(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> tuple[Candidates, Expand, State]:
        """Start a step -> the root's candidates [B, 1, K], how to go on, and the scorer's own next state."""
        raise NotImplementedError

    def commit(self, path: Tensor, count: Tensor, features: Tensor | None) -> State:
        """After acceptance: path [B, D+1], count [B] new tokens, features [B, T, ...] -> own next state."""
        return {}


class Drafter(nn.Module):
    """Scorer and tree shape together: state in, `DraftTree` out."""

    def __init__(self, scorer: Scorer, shape: TreeShape):
        super().__init__()
        self.scorer, self.shape = scorer, shape
        self.depth, self.nodes = shape.depth, shape.nodes

    def forward(self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[DraftTree, State]:
        """state as in `SpeculativeStep`, its history [B, S] cut to the slots in use; keys, values: one
        [B, H_kv, S, D] for each of the scorer's cache layers -> the tree below each row's root, and the scorer's next
        state."""
        root = state["history"].gather(1, state["lengths"][:, None])[:, 0]
        children, expand, scorer_state = self.scorer.begin(state, keys, values, self.shape)
        return self.shape.grow(root, children, expand), scorer_state
