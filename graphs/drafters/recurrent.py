"""Heads that go on from the target's hidden states with their own output: EAGLE of every version, and modules that
predict several tokens.

Position p of a head pairs the target's feature at p with the token at p + 1, and predicts the token at p + 2. Deeper
levels of a tree take the head's own output in the feature's place.
Letters: B batch, T tokens, Q of them whose outputs are wanted, F frontier nodes, D greatest depth, H the head's hidden
size, K candidates.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..attention import LayerCache, Pass, chain_pass
from ..kept import CacheLayer
from ..state import State, StateTensor
from ..tree import Candidates, Expand, TreeShape
from .drafter import Scorer, Unsaid, most_catch_up, owed_positions
from .frontier import FrontierPasses, drafting, embeddable
from .shared_noise import BestTokens


class RecurrentHead(nn.Module):
    """What is trained, and how it computes.

    feature_layers: see `Scorer`; other_layers: what else they may be, None where the publisher says which they are;
    width: of these features side by side; cache_layer: its keys and values.
    """

    feature_layers: tuple[int, ...]
    other_layers: tuple[int, ...] | None = None
    width: int
    cache_layer: CacheLayer

    def fuse(self, features: Tensor) -> Tensor:
        """Captured features [B, T, width] -> hidden states [B, T, H]."""
        return features

    def forward(self, embedded: Tensor, hidden: Tensor, where: Pass, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """embedded, hidden [B, T, H] -> (what the logits are computed of, hidden for the next level), both [B, Q, H] of
        the wanted outputs."""
        raise NotImplementedError

    def logits(self, normed: Tensor) -> Tensor:
        """[B, Q, H] -> [B, Q, V]."""
        raise NotImplementedError

    def target_ids(self) -> Tensor | None:
        """What the head's tokens are called by the target: int64 [V]; None where it has the target's own."""
        return None

    def unsaid(self) -> list[Unsaid]:
        """See `Scorer.unsaid`; the layers apart."""
        return []

    def unsaid_of_levels(self) -> list[Unsaid]:
        """Likewise, what shows from the second level on, so that all else has to be settled before."""
        return []


class CatchingUp(Scorer):
    """A scorer with a head whose cache holds `draft_lengths` positions made of true features. A step first runs the
    head over the features of the tokens committed since, and overwrites what rejected drafts left there. The features
    of the last positions are kept in `recent`, position p at p modulo its size, for steps that leave the head out.
    """

    pauses = True
    skippable = True

    def __init__(self, head: RecurrentHead, embed: nn.Embedding):
        """embed: token ids -> [.., H]; the target's own embeddings unless the checkpoint brings others."""
        super().__init__()
        self.head, self.embed = head, embed
        self.feature_layers = head.feature_layers

    def unsaid(self) -> list[Unsaid]:
        usual, other = self.head.feature_layers, self.head.other_layers
        if other is None:
            return [*self.head.unsaid(), *self.head.unsaid_of_levels()]

        def swap() -> None:
            self.feature_layers = usual if self.feature_layers == other else other

        layers = Unsaid(f"feature_layers {[*usual]}", f"feature_layers {[*other]}", swap)
        return [*self.head.unsaid(), layers, *self.head.unsaid_of_levels()]

    def cache_layers(self) -> list[CacheLayer]:
        return [self.head.cache_layer]

    def state(self, shape: TreeShape) -> dict[str, StateTensor]:
        recent = StateTensor((most_catch_up(shape), self.head.width), self.embed.weight.dtype, in_place=True)
        return {"draft_lengths": StateTensor((), torch.int64), "recent": recent}

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
        start = state["lengths"]
        index = start[:, None] + torch.arange(1, tokens.shape[1] + 1, device=start.device)
        following = state["history"].gather(1, index)
        self.run(following, self.head.fuse(features), where, keys, values)
        # The last position stays pending: the first tree needs the head's answer there.
        last, end = (count - 1)[:, None, None].expand(-1, 1, features.shape[2]), start + count - 1
        self.remember(features.gather(1, last), end, state["recent"])
        return {"draft_lengths": end}

    def commit(self, state: State, path: Tensor, features: Tensor | None) -> State:
        assert features is not None
        return {"features": features.gather(1, path[:, :, None].expand(-1, -1, features.shape[2]))}

    def remember(self, features: Tensor, first: Tensor, recent: Tensor) -> None:
        """Write features [B, T, F] of the positions from first [B] on to `recent`. What comes of rejected nodes lies
        behind the others, where the next step's will be."""
        self.remember_at(features, first[:, None] + torch.arange(features.shape[1], device=first.device), recent)

    @staticmethod
    def remember_at(features: Tensor, index: Tensor, recent: Tensor) -> None:
        """Write features [B, T, F] of positions [B, T] to `recent`."""
        row = torch.arange(features.shape[0], device=index.device)[:, None]
        recent.index_put_((row, index % recent.shape[1]), features.to(recent.dtype))

    @staticmethod
    def recalled(recent: Tensor, index: Tensor) -> Tensor:
        """The features [B, C, F] of positions [B, C] that `recent` holds."""
        return recent.gather(1, (index % recent.shape[1])[:, :, None].expand(-1, -1, recent.shape[2]))

    def catch_up(self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Run over the positions since `draft_lengths`, the last ones where they are more than the step says -> what
        the head makes of the last one, [B, 1, H] for the logits and for the next level, and what `draft_lengths` is
        now."""
        lengths, recent, wanted = state["lengths"], state["recent"], drafting(state)
        self.remember(state["features"], lengths - state["moved"], recent)
        start, index, last = owed_positions(state, lengths)
        tokens = state["history"].gather(1, index + 1)
        where = chain_pass(start, index.shape[1], recent.shape[1], wanted, last)
        features = where.zeros_unless_wanted(self.recalled(recent, index))
        normed, hidden = self.run(tokens, self.head.fuse(features), where, keys, values)
        return normed, hidden, lengths.where(wanted, state["draft_lengths"])

    def run(
        self, tokens: Tensor, hidden: Tensor, where: Pass, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        embedded = where.zeros_unless_wanted(self.embed(embeddable(tokens, self.embed.num_embeddings)))
        return self.head(embedded, hidden, where, LayerCache(keys, values, where.slots))


class Recurrent(CatchingUp):
    """Scores with such a head: the last position scores the root's children, and its output goes on."""

    def begin(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> tuple[Candidates, Expand, State]:
        wanted = drafting(state)
        passes = FrontierPasses(state["lengths"], wanted)
        best = BestTokens(state, shape.top_k, self.head.target_ids(), wanted)
        normed, hidden, lengths = self.catch_up(state, keys, values)
        children = best(self.head.logits(normed)).where(lengths > state["draft_lengths"])

        def expand(tokens: Tensor, parents: Tensor) -> Candidates:
            nonlocal hidden
            parent = hidden.gather(1, parents[:, :, None].expand(-1, -1, hidden.shape[2]))
            normed, hidden = self.run(tokens, parent, passes.extend(parents), keys, values)
            return best(self.head.logits(normed))

        return children, expand, {"draft_lengths": lengths}
