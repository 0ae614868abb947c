"""The speculative step: draft, verify, accept, commit. The whole of it is one graph."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .accept import accept, ancestor_mask, emit
from .attention import Pass
from .drafters.drafter import Drafter
from .state import State
from .target import CausalLM


class SpeculativeStep(nn.Module):
    """state, KV tensors -> report, next state. Every row moves by 1 to D + 1 tokens; finished rows stand still.

    The report [B, D + 3] int64 is all the host reads: the number of new tokens, the finish code, the new tokens.
    """

    def __init__(self, target: CausalLM, drafter: Drafter):
        super().__init__()
        self.target, self.drafter = target, drafter

    def forward(self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, State]:
        """state as `state.row_state` and the drafter say; keys, values: one [B, H_kv, S, D] per layer, the target's
        first, written in place, as is state["history"]."""
        tree, drafter_state = self.drafter(state, keys, values)

        ancestors, depths = ancestor_mask(tree.parents, self.drafter.depth)
        where = Pass(state["lengths"], depths, ancestors, depths)
        logits, features = self.target(tree.tokens, where, keys, values)
        choice = logits.argmax(-1)

        path, accepted = accept(tree, ancestors, depths, choice, self.drafter.depth)
        tokens, count, finish = emit(state, path, accepted, choice)

        commit([*keys[: self.target.layers], *values[: self.target.layers]], state["lengths"], path)
        put(state["history"], state["lengths"] + 1, tokens)
        drafter_state |= self.drafter.scorer.commit(path, count, features)
        report = torch.cat([count[:, None], finish[:, None], tokens], 1)
        return report, {"lengths": state["lengths"] + count, "finish": finish} | drafter_state


def commit(caches: Sequence[Tensor], lengths: Tensor, path: Tensor) -> None:
    """Move the KV of the accepted path [B, D+1] into consecutive slots, in place. The root is in place already."""
    rows = torch.arange(path.shape[0], device=path.device)[:, None]
    to = lengths[:, None] + torch.arange(path.shape[1], device=path.device)
    for cache in caches if path.shape[1] > 1 else ():
        cache[rows, :, to[:, 1:]] = cache[rows, :, (lengths[:, None] + path)[:, 1:]]


def put(history: Tensor, start: Tensor, tokens: Tensor) -> None:
    """Write tokens [B, n] into history [B, S] from start [B] on, in place. What lies past the row's length is never
    read."""
    index = start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    history.scatter_(1, index, tokens)
