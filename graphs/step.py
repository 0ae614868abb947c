"""The speculative step: verify, accept, commit, and draft the next tree. The whole of it is one graph."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..kernels.accept.op import accept
from ..kernels.compact.op import compact
from ..kernels.tree_layout.op import tree_layout
from ..report import SCALARS, Report
from .attention import Pass
from .choice import Choice, reported_log_probs, sampled_choice
from .drafters.drafter import Drafter
from .emit import emit
from .state import State, near
from .target import CausalLM
from .tree import drafted_tree, sibling_ranks


class SpeculativeStep(nn.Module):
    """state, KV tensors -> report, next state. Every row moves by 1 to D + 1 tokens; finished rows stand still.

    The report [B, 3 + (D + 1) * (4 + 2 * N)] int64 is all that the host reads of a step; `report.Report` names its
    columns. The tree that a step verifies was drafted at the end of the one before, or of the prefill: it lies in the
    state, where the host may look at it and say which tokens are allowed after each of its nodes.
    """

    def __init__(self, target: CausalLM, drafter: Drafter, choice: Choice = sampled_choice):
        super().__init__()
        self.target, self.drafter, self.choice = target, drafter, choice

    def forward(self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, State]:
        """state as `state.row_state` and the drafter say; keys, values: one [B, H_kv, S, D] per layer, the target's
        first, written in place, as are state["history"] and what all rows share."""
        layers, slots = self.target.layers, keys[0].shape[2]
        state = near(state, slots)
        tree = drafted_tree(state)
        ancestors, depths = tree_layout(tree.parents, tree.valid)
        where = Pass(state["lengths"], depths, ancestors, depths)
        logits, features = self.target(tree.tokens, where, keys[:layers], values[:layers])
        choice = self.choice(logits, tree, ancestors, depths, state)

        path, accepted = accept(*tree, ancestors, depths, choice, self.drafter.depth)
        tokens, count, finish = emit(state, path, accepted, choice)
        log_probs = reported_log_probs(logits, path, tokens, state)

        compact([*keys[:layers], *values[:layers]], state["lengths"], path, accepted)
        put(state["history"], state["lengths"] + 1, tokens)
        after = {"lengths": state["lengths"] + count, "finish": finish}
        after |= self.drafter.scorer.commit(path, count, features)
        after |= self.drafter(state | after | {"moved": count}, keys[layers:], values[layers:])

        ranks = sibling_ranks(tree).gather(1, path)
        report = Report(count, finish, accepted.where(count > 0, 0), tokens, path, ranks, *log_probs)
        return torch.cat([torch.stack(report[:SCALARS], 1), *report[SCALARS:]], 1), after


def put(history: Tensor, start: Tensor, tokens: Tensor) -> None:
    """Write tokens [B, n] into history [B, S] from start [B] on, in place. What lies past the row's length is never
    read."""
    index = start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    history.scatter_(1, index, tokens)
