"""Bigram and trigram tables of a corpus: the most probable continuations of the last token, and of the last two.

How they lie in memory and are looked up: `kernels/ngram/tables.py`. Letters: V vocabulary, R pairs that have a
row, K entries of a row.
"""

import torch
from torch import Tensor, nn

from ...kernels.ngram.tables import EMPTY, LEVELS, LEVELS_PER_NAT, WIDTH, home

LOAD = 0.7  # of the slots that have a pair


def pack(tokens: Tensor, probabilities: Tensor) -> Tensor:
    """Tokens, -1 where there is none, and their probabilities -> entries, int32."""
    level = (probabilities.log() * -LEVELS_PER_NAT).round().clamp(0, LEVELS - 1).to(torch.int64)
    return (tokens * LEVELS + level).where(tokens >= 0, EMPTY).to(torch.int32)


class NgramTables(nn.Module):
    """Bigrams indexed by the last token, trigrams hashed by the last two."""

    def __init__(self, bigrams: Tensor, pairs: Tensor, trigrams: Tensor):
        """bigrams [V, K] int32 entries; pairs [R, 2] token ids, each once; trigrams [R, K] int32 entries, already
        interpolated with the bigrams: they stand alone where there is a row."""
        super().__init__()
        self.vocabulary = bigrams.shape[0]
        keys, rows = pairs[:, 0].long() * self.vocabulary + pairs[:, 1], trigrams
        slots, buckets = place(pairs.long())
        size = buckets * WIDTH
        self.bigrams: Tensor
        self.keys: Tensor
        self.trigrams: Tensor
        self.probability: Tensor
        self.register_buffer("bigrams", bigrams.contiguous())
        self.register_buffer("keys", torch.full((size,), EMPTY, dtype=torch.int64).index_put((slots,), keys))
        empty = torch.full((size, rows.shape[1]), EMPTY, dtype=torch.int32)
        self.register_buffer("trigrams", empty.index_put((slots,), rows))
        # A buffer, so that all backends read the same bits where their exp might differ in the last one.
        self.register_buffer("probability", (torch.arange(LEVELS) / -LEVELS_PER_NAT).exp())

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `look_up` takes."""
        return self.bigrams, self.keys, self.trigrams, self.probability


def place(pairs: Tensor) -> tuple[Tensor, int]:
    """pairs [R, 2] -> a slot for each [R], none shared, and the number of buckets. Raises ValueError for pairs that are
    not unique."""
    if len(pairs.unique(dim=0)) != len(pairs):
        raise ValueError("trigrams: expected each pair of tokens once, got some of them twice")
    buckets = 1 + int(len(pairs) / (LOAD * WIDTH))
    while True:
        choices = [home(pairs[:, i], pairs[:, 1 - i], buckets).tolist() for i in (0, 1)]
        used, slots = [0] * buckets, []
        for one, other in zip(*choices, strict=True):
            chosen = one if used[one] <= used[other] else other
            slots.append(chosen * WIDTH + used[chosen])
            used[chosen] += 1
        if max(used) <= WIDTH:
            return torch.tensor(slots, dtype=torch.int64), buckets
        buckets += 1 + buckets // 8
