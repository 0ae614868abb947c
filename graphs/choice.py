"""What the target says: its choice after each node of a tree, and the log-probabilities that a request asks for.

Letters: B batch, T nodes of the tree, V vocabulary, D greatest depth, N alternatives.
"""

from typing import Protocol

import torch
from torch import Tensor

from ..controls import TOP_LOGPROBS
from ..kernels.choose.op import choose
from ..kernels.top_log_probs.op import top_log_probs
from ..report import LEAST_LOGPROB, LOGPROB_STEPS
from .state import State
from .tree import DraftTree


class Choice(Protocol):
    """The target's token after each node: logits [B, T, V], the tree, its ancestors and depths as `tree_layout` says,
    how deep a tree can be at most, the step's state -> [B, T] int64."""

    def __call__(
        self, logits: Tensor, tree: DraftTree, ancestors: Tensor, depths: Tensor, depth: int, state: State
    ) -> Tensor: ...


def sampled_choice(
    logits: Tensor, tree: DraftTree, ancestors: Tensor, depths: Tensor, depth: int, state: State
) -> Tensor:
    """A sample with position-keyed noise, greedy at temperature 0: what plain decoding would say. See `Choice`."""
    return choose(
        logits,
        tree.tokens,
        ancestors,
        depths,
        state["history"],
        state["lengths"],
        state["prompt_lengths"],
        state["sampling"],
        state["seeds"],
        state["bias_ids"],
        state["bias"],
        banned_tokens(tree, depths, depth, state),
        state["allowed"],
        state["masked"],
    )


def banned_tokens(tree: DraftTree, depths: Tensor, depth: int, state: State) -> Tensor:
    """What may not follow each node, -1 for none: the last token of a banned word whose others precede, and stop tokens
    of a row that has to go on. -> [B, T, words + stop_ids] int64."""
    *context, last = state["banned_words"].unbind(2)  # [B, W] each
    words = last[:, None].expand(-1, tree.tokens.shape[1], -1)
    before = preceding_tokens(tree, depths, depth, state, len(context))  # [B, T, words' tokens - 1]
    for place, token in enumerate(context):
        agrees = (token[:, None] == before[:, :, place, None]) | (token < 0)[:, None]
        words = words.where(agrees, -1)
    early = state["lengths"][:, None] + depths + 1 < state["min_lengths"][:, None]  # [B, T], of the next token's place
    stops = state["stop_ids"][:, None].where(early[:, :, None], -1)
    return torch.cat([words, stops], 2)


def preceding_tokens(tree: DraftTree, depths: Tensor, depth: int, state: State, count: int) -> Tensor:
    """The `count` tokens that end with each node, in their order, -1 ahead of the row's first. -> [B, T, count]
    int64."""
    back = torch.arange(count - 1, -1, -1, device=depths.device)
    level = depths[:, :, None] - back  # [B, T, count] of each token; the root's is 0, and the history has the others
    place = state["lengths"][:, None, None] + level.clamp(max=0)
    earlier = state["history"].gather(1, place.clamp(min=0).flatten(1)).view(place.shape).where(place >= 0, -1)

    node, drafted = torch.zeros_like(tree.tokens) + torch.arange(depths.shape[1], device=depths.device), []
    for _ in range(min(count, depth)):
        drafted.append(tree.tokens.gather(1, node))
        node = tree.parents.gather(1, node).clamp(min=0)
    if not drafted:
        return earlier
    known = count - len(drafted)
    recent = torch.stack(drafted[::-1], 2).where(level[:, :, known:] > 0, earlier[:, :, known:])
    return torch.cat([earlier[:, :, :known], recent], 2)


def reported_log_probs(logits: Tensor, path: Tensor, tokens: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
    """Of the tokens [B, D+1] after the nodes of the path [B, D+1], and of the likeliest in their places, as integers
    (see `report`): [B, D+1], and tokens and log-probabilities [B, (D+1) * N]. Of rows that ask for them, among what
    their masks allow. state: with `allowed` of the nodes that the logits have."""
    wanted = (state["logprobs"] >= 0).long()
    cold, mask = torch.zeros_like(wanted, dtype=torch.float32), (state["allowed"], state["masked"])
    best, log_probs, total = top_log_probs(logits, path, wanted, cold, state["seeds"], path, None, TOP_LOGPROBS, *mask)
    row = torch.arange(path.shape[0], device=path.device)[:, None]
    own = logits[row, path, tokens].float() - total
    return as_integers(own), best.flatten(1), as_integers(log_probs).flatten(1)


def as_integers(log_probs: Tensor) -> Tensor:
    """Log-probabilities as the report carries them."""
    return (log_probs.clamp(min=LEAST_LOGPROB) * LOGPROB_STEPS).round().long()
