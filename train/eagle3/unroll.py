"""EAGLE-3's training-time test: the head drafts level after level over whole sequences, as it will in a step.

At level 0 position t holds the target's feature at t and token t + 1. At level k it holds the head's own output of the
level before and token t + 1 + k; its query sees the level-0 keys up to t and its own chain's keys of levels 1 to k.

Source: EAGLE-3 (arXiv 2503.01840), section 3.2. Letters: B rows, T tokens of a row, L levels, H hidden size, V draft
vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...graphs.drafters.eagle3 import Eagle3Head


class TrainingPass:
    """Stands for `Pass` and `LayerCache` in the head's own forward: holds the keys and values of all levels so far."""

    def __init__(self, sequence: Tensor):
        """sequence [B, T]: which of the sequences that share a row each token belongs to."""
        count = sequence.shape[1]
        self._first = torch.arange(count, device=sequence.device)[None]
        later = torch.ones(count, count, dtype=torch.bool, device=sequence.device).triu(1)
        self._hidden = (later | (sequence[:, :, None] != sequence[:, None]))[:, None, None]  # [B, 1, 1, T, T]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @property
    def positions(self) -> Tensor:
        """[1, T]: level k of position t stands at t + k."""
        return self._first + len(self.keys)

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[list[Tensor], list[Tensor]]:
        """key, value [B, H_kv, T, D] of the next level -> those of all levels."""
        self.keys.append(key)
        self.values.append(value)
        return self.keys, self.values

    def outputs_of(self, x: Tensor) -> Tensor:
        """x: the outputs of all tokens are wanted."""
        return x

    def attention(self, query: Tensor, keys: list[Tensor], values: list[Tensor], scale: float, *_: Any) -> Tensor:
        """query [B, H, T, D] of the last level -> [B, T, H, D]: one softmax over the level-0 keys and the chain's."""
        heads, count = keys[0].shape[1], query.shape[2]
        query = query.unflatten(1, (heads, -1)) * scale  # [B, H_kv, G, T, D]
        first = (query.flatten(2, 3) @ keys[0].transpose(2, 3)).view(*query.shape[:4], count)
        first = first.float().masked_fill(self._hidden, float("-inf"))
        chain = [(query * key[:, :, None]).sum(-1, dtype=torch.float32) for key in keys[1:]]  # each [B, H_kv, G, T]
        most = first.amax(-1)
        for score in chain:
            most = torch.maximum(most, score)
        most = most.detach()
        weight = (first - most[..., None]).exp()
        total, out = weight.sum(-1), (weight.to(query.dtype).flatten(2, 3) @ values[0]).view(query.shape).float()
        for score, value in zip(chain, values[1:], strict=True):
            share = (score - most).exp()
            total, out = total + share, out + share[..., None] * value[:, :, None]
        return (out / total[..., None]).to(query.dtype).flatten(1, 2).transpose(1, 2)


class TrainingBatch(NamedTuple):
    """Rows filled with sequences end to end: tokens [B, T] int64; sequence [B, T] int64, which one a token belongs to;
    labels [B, T] bool, whether the target wrote the token after it; features [B, T, F] and last [B, T, H_target], the
    target's hidden states."""

    tokens: Tensor
    sequence: Tensor
    labels: Tensor
    features: Tensor
    last: Tensor


def unroll(head: Eagle3Head, embed: nn.Module, batch: TrainingBatch, target_head: Tensor, levels: int) -> Tensor:
    """The outcome of a batch, sums over labels [L, 4]: loss in nats; how often the target's best token is the head's
    best, and is among its best four; labels.

    target_head [V, H_target]: the target's output rows of the draft vocabulary. Labels whose best token is outside it
    cannot be drafted; the caller leaves them out of `labels`.
    """
    where = TrainingPass(batch.sequence)
    wanted = nn.functional.linear(batch.last, target_head).float().softmax(-1)  # [B, T, V]
    best = wanted.argmax(-1, keepdim=True)
    hidden, sums = head.fuse(batch.features), []
    for level in range(levels):
        ahead = level + 1  # position t drafts what the target says at t + ahead
        following = nn.functional.pad(batch.tokens[:, ahead:], (0, ahead))
        normed, hidden = head(embed(following).to(hidden.dtype), hidden, where, where)
        logits = head.lm_head(normed[:, :-ahead]).float()
        labels = batch.labels[:, ahead:] & (batch.sequence[:, ahead:] == batch.sequence[:, :-ahead])
        loss = logits.logsumexp(-1) - (wanted[:, ahead:] * logits).sum(-1)
        score = logits.detach()
        better = (score > score.gather(-1, best[:, ahead:])).sum(-1)
        sums.append(torch.stack([(value * labels).sum() for value in (loss, better < 1, better < 4, labels)]))
    return torch.stack(sums)
