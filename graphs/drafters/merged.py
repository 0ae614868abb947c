"""Several scorers that grow one tree: at every node their candidates are mixed.

The mixture is linear, as in interpolated language models (Jelinek and Mercer, 1980). Each scorer is weighted by the
probability of its own best token, normalised over scorers, so the neural scorer dominates where n-grams are unsure. A
token that several scorers propose is one candidate. Scores stay probabilities, so scores of different nodes compare.

Letters: B batch, F frontier nodes, C candidates.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Pass
from ..kept import CacheLayer
from ..state import State, StateTensor
from ..tree import Candidates, Expand, TreeShape
from .best import best_of, rounded
from .drafter import Scorer


def parts(scorer: Scorer) -> list[Scorer]:
    """The scorers that a mixture mixes, those of mixtures in it too; of any other scorer itself alone."""
    if type(scorer) is not Merged:
        return [scorer]
    return [part for inner in scorer._scorers() for part in parts(inner)]


class Merged(Scorer):
    """Scores with several scorers at once. Each keeps its own state and cache layers."""

    def __init__(self, scorers: Sequence[Scorer], levels: int = 2):
        """levels: how many levels scorers score that need a pass for each, when there are others too. Deeper nodes are
        rarely accepted, and a pass for them costs as much as for the first level (bench/LOG.md)."""
        super().__init__()
        self.scorers, self.levels = nn.ModuleList(scorers), levels
        self.neural = any(scorer.neural for scorer in scorers)
        self.all_at_once = all(scorer.all_at_once or not scorer.neural for scorer in scorers)
        self.pauses = any(scorer.pauses for scorer in scorers)
        self.skippable = all(scorer.skippable for scorer in scorers)
        self.lookahead = max(scorer.lookahead for scorer in scorers)
        depths = [scorer.most_depth for scorer in scorers]
        self.most_depth = None if None in depths else max(depth for depth in depths if depth is not None)
        self.target_caches = tuple(place for scorer in scorers for place in scorer.target_caches)

    @property
    def feature_layers(self) -> tuple[int, ...]:  # type: ignore[override]
        """Those of its scorers, which may come to read others."""
        return tuple(layer for scorer in self._scorers() for layer in scorer.feature_layers)

    def cache_layers(self) -> list[CacheLayer]:
        return [layer for scorer in self._scorers() for layer in scorer.cache_layers()]

    def state(self, shape: TreeShape) -> dict[str, StateTensor]:
        return self._named([scorer.state(shape) for scorer in self._scorers()])

    def shared(self) -> dict[str, StateTensor]:
        return self._named([scorer.shared() for scorer in self._scorers()])

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
        own = zip(
            self._scorers(), self._states(state), self._layers(keys), self._layers(values), self._features(features),
            strict=True,
        )  # fmt: skip
        return self._named([s.prefill(tokens, count, where, its, k, v, f) for s, its, k, v, f in own])

    def begin(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> tuple[Candidates, Expand, State]:
        scorers = self._scorers()
        own = zip(scorers, self._states(state), self._with_targets(keys), self._with_targets(values), strict=True)
        begun = [scorer.begin(its, k, v, shape) for scorer, its, k, v in own]
        asked = [go_on for _, go_on, _ in begun]
        cheap = [not scorer.neural or scorer.all_at_once for scorer in scorers]
        deep = [go_on for free, go_on in zip(cheap, asked, strict=True) if free] or asked
        level = 1

        def expand(tokens: Tensor, parents: Tensor) -> Candidates:
            nonlocal level
            level += 1
            return self._mix([go_on(tokens, parents) for go_on in (asked if level <= self.levels else deep)])

        return self._mix([children for children, _, _ in begun]), expand, self._named([s for *_, s in begun])

    def commit(self, state: State, path: Tensor, features: Tensor | None) -> State:
        own = zip(self._scorers(), self._states(state), self._features(features), strict=True)
        return self._named([scorer.commit(known, path, its) for scorer, known, its in own])

    def _mix(self, candidates: Sequence[Candidates]) -> Candidates:
        """Candidates [B, F, C] of each scorer -> those of the mixture, side by side; a token that several propose is
        there as often, with the same score."""
        if len(candidates) == 1:
            return candidates[0]
        each = [best_of(own, own.tokens.shape[2]) for own in candidates]
        best = [own.log_probs.exp().amax(2, keepdim=True) for own in each]
        total = torch.cat(best, 2).sum(2, keepdim=True).clamp(min=1e-9)
        tokens = torch.cat([own.tokens for own in each], 2)  # [B, F, C] of all scorers
        share = torch.cat([own.log_probs.exp() * sure / total for own, sure in zip(each, best, strict=True)], 2)
        same = tokens[:, :, :, None] == tokens[:, :, None]  # [B, F, C, C]
        mixed = (same * share[:, :, None]).sum(-1).where(share > 0, 0.0)
        return rounded(Candidates(tokens, mixed.log()))

    def _scorers(self) -> list[Any]:
        return list(self.scorers)

    def _named(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """States of the scorers -> one dict, in which a scorer's index is ahead of its names."""
        return {f"{place}.{name}": value for place, state in enumerate(states) for name, value in state.items()}

    def _states(self, state: State) -> list[State]:
        """The state as each scorer sees it: the step's own tensors and the scorer's, under the names it declared."""
        return [
            state
            | {name.removeprefix(f"{place}."): tensor for name, tensor in state.items() if name.startswith(f"{place}.")}
            for place in range(len(self.scorers))
        ]

    def _layers(self, caches: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Each scorer's own part of the keys or of the values."""
        parts, start = [], 0
        for scorer in self._scorers():
            end = start + len(scorer.cache_layers())
            parts.append(caches[start:end])
            start = end
        return parts

    def _with_targets(self, caches: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """What each scorer begins with of the keys or of the values: those of the target that it reads, and its own."""
        count, start, parts = len(self.target_caches), 0, list[Sequence[Tensor]]()
        for scorer, own in zip(self._scorers(), self._layers(caches[count:]), strict=True):
            end = start + len(scorer.target_caches)
            parts.append([*caches[start:end], *own])
            start = end
        return parts

    def _features(self, features: Tensor | None) -> list[Tensor | None]:
        """Each scorer's own part of the captured features [B, T, L*H]."""
        counts = [len(scorer.feature_layers) for scorer in self._scorers()]
        if features is None:
            return [None] * len(counts)
        width = features.shape[-1] // max(sum(counts), 1)
        parts = features.split([width * count for count in counts], -1)
        return [part if count else None for part, count in zip(parts, counts, strict=True)]
