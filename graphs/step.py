"""The speculative step: verify, accept, commit, and draft the next tree. The whole of it is one graph. And the plain
step, which decodes one token of each row with the target alone."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.accept.op import accept
from ..kernels.bits import BITS
from ..kernels.compact.op import compact
from ..kernels.tree_layout.op import tree_layout
from ..report import SCALARS, SCORE_STEPS, Report
from .attention import Pass, chain_pass
from .choice import Choice, reported_log_probs, sampled_choice
from .drafters.drafter import Drafter
from .emit import emit
from .state import State, near
from .target import CausalLM
from .tree import DraftTree, bare_root, drafted_tree, first_nodes, missed_node, sibling_ranks, what_follows


class Verified(NamedTuple):
    """A tree and what the target says of it: logits [B, T, V], features [B, T, F] if the drafter wants some, and the
    choice [B, T] after each node."""

    tree: DraftTree
    logits: Tensor
    features: Tensor | None
    choice: Tensor


class SpeculativeStep(nn.Module):
    """nodes, state, KV tensors -> report, next state. Every row moves by 1 to D + 1 tokens; finished rows stand still.

    The report, a row of int64 for each of B rows, is all that the host reads of a step; `report.Report` names its
    columns. The tree that a step verifies was drafted at the end of the one before, and a row's first step has the bare
    root: the tree lies in the state, where the host may look at it and say which tokens are allowed after each of its
    nodes. How many of its nodes are verified is the caller's choice at each step; the text does not depend on it.
    """

    def __init__(self, target: CausalLM, drafter: Drafter, choice: Choice = sampled_choice):
        super().__init__()
        self.target, self.drafter, self.choice = target, drafter, choice

    def forward(
        self, nodes: Tensor, state: State, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> tuple[Tensor, State]:
        """nodes [T] int64: 0 .. T - 1, the nodes of the drafted tree to verify, the root the first; state as
        `state.row_state` and the drafter say, with state["catch_up"] for a scorer that pauses, see `Scorer.begin`;
        keys, values: one [B, H_kv, S, D] per layer, the target's first, written in place, as are state["history"],
        the states of recurrent layers, and what all rows share."""
        layers, state = self.target.layers, near(state, keys)
        drafted = drafted_tree(state)
        tree = first_nodes(drafted, nodes)
        ancestors, depths = (part.index_select(1, nodes) for part in self._layout(drafted))
        where = Pass(state["lengths"], depths, ancestors, depths, parents=tree.parents, state=state)
        logits, features = self.target(tree.tokens, where, keys[:layers], values[:layers])
        state = state | {"allowed": state["allowed"].index_select(1, nodes)}
        choice = self.choice(logits, tree, ancestors, depths, self.drafter.depth, state)

        path, accepted = accept(*tree, ancestors, depths, choice, self.drafter.depth)
        if layers:
            compact([*keys[:layers], *values[:layers]], state["lengths"], path, accepted)
        report, after, moved = self._commit(Verified(tree, logits, features, choice), path, accepted, state)
        where.commit(path, report.count)
        drafted, scores = self.drafter(moved, *(self._drafter_layers(caches) for caches in (keys, values)))
        return columns(report, (scores.exp() * SCORE_STEPS).round().long()), after | drafted

    def _drafter_layers(self, caches: Sequence[Tensor]) -> list[Tensor]:
        """The keys, or the values, that `Scorer.begin` gets: of the target's layers that it asks for, then its own."""
        return [*(caches[place] for place in self.drafter.scorer.target_caches), *caches[self.target.layers :]]

    def _commit(self, verified: Verified, path: Tensor, accepted: Tensor, state: State) -> tuple[Report, State, State]:
        """Commit the first `accepted` [B] nodes below the root on the path [B, D + 1], and the target's choice after
        them -> the report, without scores, what became of the state, and the whole state as the draft of the next tree
        finds it."""
        tree, logits, features, choice = verified
        drafted = drafted_tree(state)
        tokens, count, finish = emit(state, path, accepted, choice)
        log_probs = reported_log_probs(logits, path, tokens, state)
        put(state["history"], state["lengths"] + 1, tokens)
        after = {"lengths": state["lengths"] + count, "finish": finish}
        moved = state | after | {"moved": count, "verified": what_follows(state, tree, choice)}
        committed = self.drafter.scorer.commit(moved, first_of(path, tree), features)

        ranks = sibling_ranks(tree).gather(1, path)
        path = with_missed(
            path, accepted, missed_node(drafted, *(x.gather(1, accepted[:, None]) for x in (path, tokens)))
        )
        accepted, scored = accepted.where(count > 0, 0), torch.full_like(count, self.drafter.nodes)
        report = Report(count, finish, accepted, scored, None, tokens, path, ranks, *log_probs)
        return report, after | committed, moved | committed

    @staticmethod
    def _layout(tree: DraftTree) -> tuple[Tensor, Tensor]:
        """`tree_layout` of the whole tree, whose size is fixed. Its masks have more bits than the tree has nodes: were
        the last word full, the exporter would make a program for that size alone."""
        ancestors, depths = tree_layout(tree.parents, tree.valid)
        return torch.nn.functional.pad(ancestors, (0, int(depths.shape[1] % BITS == 0))), depths


class PlainStep(SpeculativeStep):
    """Plain decoding in the same state: verifies the roots alone and drafts nothing, so it costs what the target does.
    What the scorer keeps stays as it is. The text is that of a speculative step."""

    def forward(  # type: ignore[override]
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> tuple[Tensor, State]:
        """As `SpeculativeStep.forward`, without the scorer's own state and layers."""
        state = near(state, keys)
        tree = bare_root(drafted_tree(state).tokens[:, 0])
        where = chain_pass(state["lengths"], 1, 1, state=state)
        logits, features = self.target(tree.tokens, where, keys, values)
        state = state | {"allowed": state["allowed"][:, :1]}
        choice = self.choice(logits, tree, where.ancestors, where.depths, 0, state)

        path = torch.zeros_like(tree.tokens).expand(-1, self.drafter.depth + 1)
        report, after, _ = self._commit(Verified(tree, logits, features, choice), path, path[:, 0], state)
        where.commit(path[:, :1], report.count)
        return columns(report, torch.zeros_like(path[:, :1]).expand(-1, self.drafter.nodes)), after


def columns(progress: Report, scores: Tensor) -> Tensor:
    """A report with the scores [B, N] int64 of the nodes that were drafted -> its columns side by side."""
    progress = progress._replace(scores=scores)
    return torch.cat([torch.stack(progress[:SCALARS], 1), *progress[SCALARS:]], 1)


def first_of(path: Tensor, tree: DraftTree) -> Tensor:
    """The places of a path [B, D + 1] that a tree of T nodes can fill: [B, min(T, D + 1)]."""
    # Not min(T, D + 1): torch.export cannot prove that this is more than 1, and guards on it where the batch is static.
    drafted = torch.sym_min(tree.tokens.shape[1] - 1, path.shape[1] - 1)
    return path.index_select(1, torch.arange(1 + drafted, device=path.device))


def with_missed(path: Tensor, accepted: Tensor, missed: Tensor) -> Tensor:
    """The path [B, D + 1] with the missed node [B, 1] behind its last accepted one [B], where there is a place."""
    place = torch.arange(path.shape[1], device=path.device)
    return path.where(place <= accepted[:, None], missed * (place == accepted[:, None] + 1))


def put(history: Tensor, start: Tensor, tokens: Tensor) -> None:
    """Write tokens [B, n] into history [B, S] from start [B] on, in place. What lies past the row's length is never
    read."""
    index = start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    history.scatter_(1, index, tokens)
