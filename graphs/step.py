"""The speculative step: draft, verify, accept, commit. The whole of it is one graph."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..kernels.accept.op import accept
from ..kernels.compact.op import compact
from ..kernels.tree_layout.op import tree_layout
from ..report import SCALARS, Report
from .attention import Pass
from .drafters.drafter import Drafter
from .emit import emit
from .state import State
from .target import CausalLM
from .tree import sibling_ranks


class SpeculativeStep(nn.Module):
    """state, KV tensors -> report, next state. Every row moves by 1 to D + 1 tokens; finished rows stand still.

    The report [B, 3 + 3 * (D + 1)] int64 is all that the host reads; `report.Report` names its columns.
    """

    def __init__(self, target: CausalLM, drafter: Drafter):
        super().__init__()
        self.target, self.drafter = target, drafter

    def forward(self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, State]:
        """state as `state.row_state` and the drafter say; keys, values: one [B, H_kv, S, D] per layer, the target's
        first, written in place, as is state["history"]."""
        layers, slots = self.target.layers, keys[0].shape[2]
        near = state | {"history": state["history"][:, :slots]}  # the cost follows the tokens really there
        tree, drafter_state = self.drafter(near, keys[layers:], values[layers:])

        ancestors, depths = tree_layout(tree.parents, tree.valid)
        where = Pass(state["lengths"], depths, ancestors, depths)
        logits, features = self.target(tree.tokens, where, keys[:layers], values[:layers])
        choice = logits.argmax(-1)

        path, accepted = accept(*tree, ancestors, depths, choice, self.drafter.depth)
        tokens, count, finish = emit(state, path, accepted, choice)

        compact([*keys[:layers], *values[:layers]], state["lengths"], path, accepted)
        put(state["history"], state["lengths"] + 1, tokens)
        drafter_state |= self.drafter.scorer.commit(path, count, features)
        ranks = sibling_ranks(tree).gather(1, path)
        report = Report(count, finish, accepted.where(count > 0, 0), tokens, path, ranks)
        columns = torch.cat([torch.stack(report[:SCALARS], 1), *report[SCALARS:]], 1)
        return columns, {"lengths": state["lengths"] + count, "finish": finish} | drafter_state


def put(history: Tensor, start: Tensor, tokens: Tensor) -> None:
    """Write tokens [B, n] into history [B, S] from start [B] on, in place. What lies past the row's length is never
    read."""
    index = start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    history.scatter_(1, index, tokens)
