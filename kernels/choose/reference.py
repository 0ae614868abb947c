"""The target's choice after each node, in plain torch: the specification, and what torch runs without a kernel.

The processors and their order are those of transformers and vLLM: logit bias, repetition penalty, presence and
frequency penalties, bans; temperature, top-k, top-p, min-p. The choice is the maximum of log-probability plus Gumbel
noise, which is a sample, or of the log-probability alone at temperature 0.
"""

import torch
from torch import Tensor

from ...controls import Sampling
from ..bits import only_allowed, unpack_bits
from ..noise import gumbel


def choose(
    logits: Tensor,
    tokens: Tensor,
    ancestors: Tensor,
    depths: Tensor,
    history: Tensor,
    lengths: Tensor,
    prompt_lengths: Tensor,
    sampling: Tensor,
    seeds: Tensor,
    bias_ids: Tensor,
    bias: Tensor,
    banned: Tensor,
    allowed: Tensor,
    masked: Tensor,
) -> Tensor:
    """The token after each node of a tree, the lowest id among equals.

    Args:
        logits: [B, T, V], of any floating dtype.
        tokens, depths: int64 [B, T]. ancestors: int32 [B, T, W], from `tree_layout`.
        history: int64 [B, S], the row's tokens; the root is the one at index lengths[b].
        lengths, prompt_lengths: int64 [B]; tokens from index prompt_lengths[b] on are output.
        sampling: float32 [B, 7], the columns of `controls.Sampling`; 0 turns each of them off.
        seeds: int64 [B], not negative.
        bias_ids: int64 [B, E], each id once, -1 for none; bias: float32 [B, E], added to these tokens' logits.
        banned: int64 [B, T, X], tokens that may not follow a node, -1 for none.
        allowed: int32 [B, T, ceil(V / 32)]; bit j of word w: token 32 * w + j may follow. masked: int64 [B], 0 where a
            row's `allowed` says nothing.

    Where no token is left, the choice is token 0. Tokens that tie with the last one that top-k or top-p keeps are kept.

    Returns:
        int64 [B, T].
    """
    at_root = _counts(history, lengths, prompt_lengths, logits.shape[2])
    x = _biased(logits.float(), bias_ids, bias)
    x = _penalized(x, at_root, tokens, ancestors, sampling)
    x = _without(x, banned, allowed, masked)
    temperature = sampling[:, 0, None, None]
    scaled = filtered(x / temperature.where(temperature > 0, 1.0), sampling)
    positions = lengths[:, None] + depths + 1
    ids = torch.arange(logits.shape[2], device=logits.device)
    noisy = scaled + gumbel(seeds[:, None, None], positions[:, :, None], ids)
    return torch.where(temperature > 0, noisy, x).argmax(-1)


def _counts(history: Tensor, lengths: Tensor, prompt_lengths: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """How often each token is in a row up to its root: in all, and in the output, float32 [B, V] each."""
    place = torch.arange(history.shape[1], device=history.device)
    there = place <= lengths[:, None]
    known = history.clamp(0, vocabulary - 1)
    zeros = torch.zeros(history.shape[0], vocabulary, device=history.device)
    every = zeros.scatter_add(1, known, there.float())
    return every, zeros.scatter_add(1, known, (there & (place >= prompt_lengths[:, None])).float())


def _biased(x: Tensor, bias_ids: Tensor, bias: Tensor) -> Tensor:
    added = torch.zeros(x.shape[0], x.shape[2] + 1, device=x.device)  # one more, for places without an id
    added = added.scatter(1, bias_ids.where(bias_ids >= 0, x.shape[2]), bias.where(bias_ids >= 0, 0.0))
    return x + added[:, None, :-1]


def _penalized(
    x: Tensor, at_root: tuple[Tensor, Tensor], tokens: Tensor, ancestors: Tensor, sampling: Tensor
) -> Tensor:
    """Penalties of what is in the row and on the path to a node."""
    penalties = Sampling(*(column[:, None, None] for column in sampling.unbind(1)))
    count = tokens.shape[1]
    node = torch.arange(count, device=x.device)
    drafted = unpack_bits(ancestors, count).float() * (node > 0)  # the root is in the row
    path = torch.zeros_like(x).scatter_add(2, tokens[:, None].expand(-1, count, -1), drafted)
    every, output = (counted[:, None] + path for counted in at_root)
    repeated = penalties.repetition_penalty.where(penalties.repetition_penalty > 0, 1.0)
    x = torch.where(every > 0, torch.where(x > 0, x / repeated, x * repeated), x)
    return x - penalties.frequency_penalty * output - penalties.presence_penalty * (output > 0)


def _without(x: Tensor, banned: Tensor, allowed: Tensor, masked: Tensor) -> Tensor:
    """-inf for what is banned, and for what is not allowed."""
    vocabulary = x.shape[2]
    out = torch.zeros(*x.shape[:2], vocabulary + 1, dtype=torch.bool, device=x.device)
    out = out.scatter(2, banned.where(banned >= 0, vocabulary), True)[:, :, :-1]
    return only_allowed(x.masked_fill(out, -torch.inf), allowed, masked)


def filtered(scaled: Tensor, sampling: Tensor) -> Tensor:
    """Logits [B, T, V], divided by the temperature, with -inf for what top-k, then top-p, then min-p leave out."""
    limits = Sampling(*(column[:, None, None] for column in sampling.unbind(1)))
    vocabulary = scaled.shape[2]
    order = scaled.sort(-1, descending=True).values
    most = limits.top_k.long().where(limits.top_k > 0, vocabulary).clamp(1, vocabulary)
    least = order.gather(2, (most - 1).expand(-1, scaled.shape[1], -1))
    order = order.masked_fill(order < least, -torch.inf)
    probability = order.softmax(-1)
    before = probability.cumsum(-1) - probability  # of the tokens ahead of each
    kept = before < limits.top_p.where(limits.top_p > 0, 2.0)
    least = order.where(kept, torch.inf).amin(-1, keepdim=True).maximum(least)
    least = least.maximum(order[:, :, :1] + limits.min_p.log())
    return scaled.masked_fill(scaled < least, -torch.inf)
