"""Prefill: fill the caches of one row with the next chunk of its prompt."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .attention import chain_pass
from .drafters.drafter import Drafter
from .state import State, near
from .target import CausalLM


class Prefill(nn.Module):
    """tokens, count, the row's state, its KV tensors -> next state. The prompt's last token is left to the first
    step: it is the root, so prefill computes no logits. The last chunk drafts the first step's tree."""

    def __init__(self, target: CausalLM, drafter: Drafter, chunk: int):
        """chunk: most tokens of a call."""
        super().__init__()
        self.target, self.drafter, self.chunk = target, drafter, chunk

    def forward(
        self, tokens: Tensor, count: Tensor, state: State, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> State:
        """tokens [1, T] int64, of which the first count [1] int64 are the row's next ones; state as in the step,
        its history already holding the whole prompt; keys, values [1, H_kv, S, D], written in place."""
        where = chain_pass(state["lengths"], tokens.shape[1], self.chunk)
        layers = self.target.layers
        _, features = self.target(tokens, where, keys[:layers], values[:layers])
        after = {"lengths": state["lengths"] + count}
        after |= self.drafter.scorer.prefill(tokens, count, where, state, keys[layers:], values[layers:], features)

        pending = {"moved": count * 0, "catch_up": torch.arange(1, device=count.device)}
        searched = near(state | after | pending, keys[0].shape[2])
        drafted = self.drafter(searched, keys[layers:], values[layers:])
        last = after["lengths"] + 1 == state["prompt_lengths"]
        return after | {
            name: tensor.where(_like(last, tensor), (state | after)[name]) for name, tensor in drafted.items()
        }


def _like(rows: Tensor, tensor: Tensor) -> Tensor:
    """rows [B] in the rank of a tensor [B, ...]."""
    return rows.reshape(-1, *[1] * (tensor.dim() - 1))
