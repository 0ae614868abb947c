"""Prefill: fill the caches of one row with the next chunk of its prompt."""

from collections.abc import Sequence

from torch import Tensor, nn

from .attention import chain_pass
from .drafters.drafter import Drafter
from .state import State
from .target import CausalLM


class Prefill(nn.Module):
    """tokens, count, the row's state, its KV tensors -> next state. The prompt's last token is left to the first
    step: it is the root, so prefill computes no logits."""

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
        scorer_state = self.drafter.scorer.prefill(
            tokens, count, where, state, keys[layers:], values[layers:], features
        )
        return {"lengths": state["lengths"] + count} | scorer_state
