"""A drafter: a scorer of next tokens and the shape of the tree that is grown from its scores."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ... import controls
from ..attention import Pass
from ..kept import CacheLayer
from ..state import State, StateTensor
from ..tree import Candidates, Expand, TreeShape, tree_state
from .shared_noise import Ranking


class Unsaid(NamedTuple):
    """What the publisher of a checkpoint leaves open. usual: how the scorer takes it; other: how else it may be meant,
    both for people; swap: has the scorer take it in the other way, and when called again in the usual one."""

    usual: str
    other: str
    swap: Callable[[], None]


class Scorer(nn.Module):
    """What a drafting method implements, see docs/your-own-drafter.md. The defaults suit one that keeps nothing between
    steps.

    neural: whether scoring a level costs a pass over weights. all_at_once: whether `begin` scores all levels with one
    pass, so that a deeper one costs nothing. pauses: whether a step may leave the scorer out; it then
    proposes nothing, does as little as it can, and catches up later: see `begin`. skippable: whether a step may draft
    nothing: `begin` is not called then, and nothing is kept of what `commit` returns.
    most_depth: how many levels of a tree it can score, None for any number.
    lookahead: how many tokens past its own a slot of its caches may depend on, 1 to 32, as a head's does that
    takes the embedding of the next token; the prefix cache keeps no slot whose tokens are not all known.
    feature_layers: indices of the target's hidden states to get as features, side by side; i is the input of layer i,
    the number of layers the output of the last one, and the next index that behind the final norm.
    target_caches: which of the target's cache layers `begin` reads: it gets them ahead of the scorer's own.
    `keys` and `values` are the scorer's own cache layers, one [B, heads, S, size] for each, written in place. What
    `state` declares, `prefill` returns, and `begin` and `commit` return together, but for what is written in place.
    What else `commit` returns is for the `begin` that follows, and is not kept.
    """

    neural = True
    all_at_once = False
    pauses = False
    skippable = False
    most_depth: int | None = None
    lookahead = 1
    feature_layers: tuple[int, ...] = ()
    target_caches: tuple[int, ...] = ()

    def unsaid(self) -> list[Unsaid]:
        """What its publisher leaves open, that first of which a wrong reading spoils most."""
        return []

    def cache_layers(self) -> list[CacheLayer]:
        """The scorer's own KV cache, a shape for each layer."""
        return []

    def state(self, shape: TreeShape) -> dict[str, StateTensor]:
        """What the scorer keeps between steps: its own state tensors by name."""
        return {}

    def shared(self) -> dict[str, StateTensor]:
        """What all rows share and the engine keeps, by name: written in place, by `commit` or by `begin`."""
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
        """Process a chunk of a prompt -> own next state. Nothing is drafted: the first tree is that of the first step.

        tokens [1, T] int64, of which the first count [1] are the prompt's next ones; where: the target's pass over
        them; state["history"]: the whole prompt; features [1, T, layers * hidden], None without feature layers.
        """
        return {}

    def begin(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> tuple[Candidates, Expand, State]:
        """Start a tree -> the root's candidates [B, 1, C], C at least `shape.top_k`, a function that scores each
        further frontier, and own next state.

        state["history"] [B, S] is cut to the slots in use; the root is its token at state["lengths"] [B]; the last
        state["moved"] [B] of its tokens, the root among them, came with this step. A scorer that pauses finds
        state["catch_up"] [C] int64: 0 .. C - 1, for the last C positions at most of those that it has not processed; or
        a single -1 for a step that leaves it out. A scorer with a whole distribution takes its candidates from
        `BestTokens`, which knows what suits a row that is sampled.
        """
        raise NotImplementedError

    def commit(self, state: State, path: Tensor, features: Tensor | None) -> State:
        """After acceptance -> own next state, and what `begin` needs beside it.

        state: as in `begin`, but for the scorer's own, which is not to be read; state["verified"] [B, T, 3]: of each
        node that the step verified, accepted or not, see `tree.what_follows`; path [B, P] int64: accepted nodes, the
        root first, P = min(T, D + 1); features [B, T, layers * hidden] of the T nodes that the step verified, 1 to N +
        1 of them, None without feature layers.
        """
        return {}


def owed_positions(state: State, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a scorer that pauses has to process: the positions from `draft_lengths` to `lengths`, the last ones where
    they are more than the step says -> the first [B]; C from it on [B, C], as many as the step says; and where
    lengths - 1, the last one, is among them [B, 1]."""
    start = torch.maximum(state["draft_lengths"], lengths - state["catch_up"].shape[0])
    return start, start[:, None] + state["catch_up"].clamp(min=0), (lengths - start - 1).clamp(min=0)[:, None]


def most_catch_up(shape: TreeShape) -> int:
    """The most positions that a scorer which pauses processes in a step over such trees."""
    return controls.most_catch_up(shape.depth)


class Drafter(nn.Module):
    """A scorer and the shape of the tree that it grows: state in, the next step's tree and the scorer's state out."""

    def __init__(self, scorer: Scorer, shape: TreeShape):
        super().__init__()
        self.scorer, self.shape = scorer, shape
        self.depth, self.nodes = shape.depth, shape.nodes

    def forward(self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[State, Tensor]:
        """state as after a commit, its history [B, S] cut to the slots in use, and "moved", see `Scorer.begin`; keys,
        values: one [B, H_kv, S, D] for each of the cache layers that `Scorer.begin` gets -> the tree below each row's
        root, as the state holds it, and the scorer's next state; the scores of its nodes, see `TreeShape.grow`."""
        root = state["history"].gather(1, state["lengths"][:, None])[:, 0]
        children, expand, scorer_state = self.scorer.begin(state, keys, values, self.shape)
        ranking = Ranking(state, self.shape.top_k)
        tree, scores = self.shape.grow(root, ranking(children), lambda *frontier: ranking(expand(*frontier)))
        return tree_state(tree) | scorer_state, scores
