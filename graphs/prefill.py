"""Prefill: fill the caches of one row with the next chunk of its prompt."""

from collections.abc import Sequence

from torch import Tensor, nn

from .attention import chain_pass
from .drafters.drafter import Scorer
from .state import State
from .target import CausalLM


class Prefill(nn.Module):
    """tokens, count, the row's state, its KV tensors -> next state. The prompt's last token is left to the first step,
    whose root it is: so prefill computes no logits and drafts nothing."""

    def __init__(self, target: CausalLM, scorer: Scorer, chunk: int):
        """chunk: most tokens of a call."""
        super().__init__()
        self.target, self.scorer, self.chunk = target, scorer, chunk

    def forward(
        self, tokens: Tensor, count: Tensor, state: State, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> State:
        """tokens [1, T] int64, of which the first count [1] int64 are the row's next ones; state as in the step,
        its history already holding the whole prompt; keys, values [1, H_kv, S, D], written in place."""
        where = chain_pass(state["lengths"], tokens.shape[1], self.chunk, state=state, count=count)
        layers = self.target.layers
        _, features = self.target(tokens, where, keys[:layers], values[:layers])
        own = self.scorer.prefill(tokens, count, where, state, keys[layers:], values[layers:], features)
        return {"lengths": state["lengths"] + count} | own
