"""The speculative step: verify, accept, commit, and draft the next tree. The whole of it is one graph."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..kernels.accept.op import accept
from ..kernels.compact.op import compact
from ..kernels.tree_layout.op import tree_layout
from ..kernels.tree_layout.reference import BITS
from ..report import SCALARS, Report
from .attention import Pass
from .choice import Choice, reported_log_probs, sampled_choice
from .drafters.drafter import Drafter
from .emit import emit
from .state import State, near
from .target import CausalLM
from .tree import DraftTree, drafted_tree, first_nodes, missed_node, sibling_ranks


class SpeculativeStep(nn.Module):
    """nodes, state, KV tensors -> report, next state. Every row moves by 1 to D + 1 tokens; finished rows stand still.

    The report [B, 3 + (D + 1) * (4 + 2 * N)] int64 is all that the host reads of a step; `report.Report` names its
    columns. The tree that a step verifies was drafted at the end of the one before, or of the prefill: it lies in the
    state, where the host may look at it and say which tokens are allowed after each of its nodes. How many of its nodes
    are verified is the caller's choice at each step, and so is which rows get a next tree; the text depends on neither.
    """

    def __init__(self, target: CausalLM, drafter: Drafter, choice: Choice = sampled_choice):
        super().__init__()
        self.target, self.drafter, self.choice = target, drafter, choice

    def forward(
        self, nodes: Tensor, draft_rows: Tensor, state: State, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> tuple[Tensor, State]:
        """nodes [T] int64: 0 .. T - 1, the nodes of the drafted tree to verify, the root the first; draft_rows [R]
        int64: 0 .. R - 1, the rows for which the next tree is drafted, all or none as a rule; state as
        `state.row_state` and the drafter say, with state["catch_up"] for a scorer that pauses, see `Scorer.begin`;
        keys, values: one [B, H_kv, S, D] per layer, the target's first, written in place, as are state["history"] and
        what all rows share. Of the scorer's own state and layers and of the returned tree there are R rows."""
        layers, slots = self.target.layers, keys[0].shape[2]
        state = near(state, slots)
        drafted = drafted_tree(state)
        tree = first_nodes(drafted, nodes)
        ancestors, depths = (part.index_select(1, nodes) for part in self._layout(drafted))
        where = Pass(state["lengths"], depths, ancestors, depths)
        logits, features = self.target(tree.tokens, where, keys[:layers], values[:layers])
        allowed = {"allowed": state["allowed"].index_select(1, nodes)}
        choice = self.choice(logits, tree, ancestors, depths, state | allowed)

        path, accepted = accept(*tree, ancestors, depths, choice, self.drafter.depth)
        tokens, count, finish = emit(state, path, accepted, choice)
        log_probs = reported_log_probs(logits, path, tokens, state)

        compact([*keys[:layers], *values[:layers]], state["lengths"], path, accepted)
        put(state["history"], state["lengths"] + 1, tokens)
        after = {"lengths": state["lengths"] + count, "finish": finish}
        moved = state | after | {"moved": count}
        committed = self.drafter.scorer.commit(moved, first_of(path, nodes), features)
        drafting = self._of_rows(moved, committed, draft_rows)
        after |= {name: drafting[name] for name in committed}
        after |= self.drafter(drafting, keys[layers:], values[layers:])

        ranks = sibling_ranks(tree).gather(1, path)
        path = with_missed(
            path, accepted, missed_node(drafted, *(x.gather(1, accepted[:, None]) for x in (path, tokens)))
        )
        report = Report(count, finish, accepted.where(count > 0, 0), tokens, path, ranks, *log_probs)
        return torch.cat([torch.stack(report[:SCALARS], 1), *report[SCALARS:]], 1), after

    def _of_rows(self, state: State, committed: State, rows: Tensor) -> State:
        """The state of the rows [R] to draft for; the scorer's own has no others."""
        scorer = self.drafter.scorer
        whole = {**scorer.state(self.drafter.shape), **scorer.shared(), "catch_up": None}
        kept = {name: tensor for name, tensor in state.items() if name in whole}
        others = {name: tensor for name, tensor in state.items() if name not in whole} | committed
        return kept | {name: tensor.index_select(0, rows) for name, tensor in others.items()}

    @staticmethod
    def _layout(tree: DraftTree) -> tuple[Tensor, Tensor]:
        """`tree_layout` of the whole tree, whose size is fixed; with a bit to spare, for masks of a part of it that are
        just full would be a case of their own to the exporter."""
        ancestors, depths = tree_layout(tree.parents, tree.valid)
        return torch.nn.functional.pad(ancestors, (0, int(depths.shape[1] % BITS == 0))), depths


def first_of(path: Tensor, nodes: Tensor) -> Tensor:
    """The places of a path [B, D + 1] that a tree of T nodes can fill: [B, min(T, D + 1)]."""
    # Not min(T, D + 1): torch.export cannot prove that this is more than 1, and guards on it where the batch is static.
    drafted = torch.sym_min(nodes.shape[0] - 1, path.shape[1] - 1)
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
