"""Drafts of every position of whole sequences at once, level after level, and what they are worth.

Position t of a row pairs the target's feature at t with token t + 1, and its level k drafts the token at t + 2 + k. A
query of level k sees what was kept of the sequence's positions up to t, and the levels 0 to k of its own position: what
it would see in a step whose root is token t + 1.
Letters: B rows, T tokens of a row, L levels, H hidden size, V draft vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class TrainingPass:
    """Stands for `Pass` and `LayerCache` in a drafter's own forward. Each layer hands over the keys and values of the
    text first, then those of each level. A block drafter writes its text apart; a head's level 0 is its text."""

    def __init__(self, sequence: Tensor):
        """sequence [B, T]: which of the sequences that share a row each token belongs to."""
        count = sequence.shape[1]
        self._first = torch.arange(count, device=sequence.device)[None]
        later = torch.ones(count, count, dtype=torch.bool, device=sequence.device).triu(1)
        self._hidden = (later | (sequence[:, :, None] != sequence[:, None]))[:, None, None]  # [B, 1, 1, T, T]
        self._layers: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    @property
    def positions(self) -> Tensor:
        """[1, T]: what comes k-th stands at t + k."""
        return self._first + len(self._layers[0][0] if self._layers else ())

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[list[Tensor], list[Tensor]]:
        """key, value [B, H_kv, T, D] of a layer's next level -> those of all its levels."""
        keys, values = self._layers.setdefault(layer_idx, ([], []))
        keys.append(key)
        values.append(value)
        return keys, values

    def outputs_of(self, x: Tensor) -> Tensor:
        """x: the outputs of all tokens are wanted."""
        return x

    def attention(self, query: Tensor, keys: list[Tensor], values: list[Tensor], scale: float, *_: Any) -> Tensor:
        """query [B, H, T, D] of the last level -> [B, T, H, D]: one softmax over the text's keys and the chain's."""
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

    def ahead(self, count: int) -> Tensor:
        """The token [B, T] so many behind each, 0 behind a row's end."""
        return nn.functional.pad(self.tokens[:, count:], (0, count))


Levels = Callable[[Any, nn.Module, TrainingBatch, int], Sequence[Tensor]]


def unroll(
    levels: Levels, drafter: nn.Module, embed: nn.Module, batch: TrainingBatch, target_head: Tensor, count: int
) -> Tensor:
    """The outcome of a batch, sums over labels [L, 4]: loss in nats; how often the target's best token is the drafter's
    best, and is among its best four; labels.

    levels: drafter, the target's embeddings, a batch and a count -> the logits [B, T, V] of so many levels;
    target_head [V, H_target]: the target's output rows of the draft vocabulary. Labels whose best token is outside it
    cannot be drafted; the caller leaves them out of `labels`.
    """
    wanted = nn.functional.linear(batch.last, target_head).float().softmax(-1)  # [B, T, V]
    best = wanted.argmax(-1, keepdim=True)
    sums = []
    for level, drafted in enumerate(levels(drafter, embed, batch, count)):
        ahead = level + 1  # position t drafts what the target says at t + ahead
        logits = drafted[:, :-ahead].float()
        labels = batch.labels[:, ahead:] & (batch.sequence[:, ahead:] == batch.sequence[:, :-ahead])
        loss = logits.logsumexp(-1) - (wanted[:, ahead:] * logits).sum(-1)
        score = logits.detach()
        better = (score > score.gather(-1, best[:, ahead:])).sum(-1)
        sums.append(torch.stack([(value * labels).sum() for value in (loss, better < 1, better < 4, labels)]))
    return torch.stack(sums)
