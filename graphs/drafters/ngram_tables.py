"""Bigram and trigram tables of a corpus: the most probable continuations of the last token, and of the last two.

An entry packs a token and its probability in one int32: token * 256 + level, probability exp(-level / 16), -1 where
there is none. Letters: B batch, F frontier nodes, V vocabulary, R pairs that have a row, Z hash slots, K entries of a
row.
"""

import torch
from torch import Tensor, nn

LEVELS = 256
LEVELS_PER_NAT = 16
EMPTY = -1

WIDTH = 8  # slots of a bucket; a pair lies in one of two buckets, the emptier when it came: 16 probes, 0.7 full
LOAD = 0.7
MIX = (2654435761, 2246822519, 2146121005)  # products stay inside int64


def pack(tokens: Tensor, probabilities: Tensor) -> Tensor:
    """Tokens, -1 where there is none, and their probabilities -> entries, int32."""
    level = (probabilities.log() * -LEVELS_PER_NAT).round().clamp(0, LEVELS - 1).to(torch.int64)
    return (tokens * LEVELS + level).where(tokens >= 0, EMPTY).to(torch.int32)


class NgramTables(nn.Module):
    """Bigrams indexed by the last token, trigrams hashed by the last two, the pair stored and compared: a lookup
    never returns another pair's row."""

    def __init__(self, bigrams: Tensor, pairs: Tensor, trigrams: Tensor):
        """bigrams [V, K] int32 entries; pairs [R, 2] token ids, each once; trigrams [R, K] int32 entries, already
        interpolated with the bigrams: they stand alone where there is a row."""
        super().__init__()
        self.vocabulary = bigrams.shape[0]
        keys, rows = pairs[:, 0].long() * self.vocabulary + pairs[:, 1], trigrams
        slots, self.buckets = place(pairs.long())
        size = self.buckets * WIDTH
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

    def forward(self, previous: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """The last two tokens [B, F], previous negative where there is none -> tokens [B, F, K] int64, -1 where
        there is none, and their probabilities [B, F, K]."""
        before = previous.clamp(min=0)
        buckets = torch.stack([home(before, last, self.buckets), home(last, before, self.buckets)], 2)  # [B, F, 2]
        slots = (buckets[:, :, :, None] * WIDTH + torch.arange(WIDTH, device=last.device)).flatten(2)  # [B, F, 2*WIDTH]
        key = (previous * self.vocabulary + last)[:, :, None]
        slot = slots.where(self.keys[slots] == key, -1).amax(-1)  # both buckets may be the same one
        entries = torch.where((slot >= 0)[:, :, None], self.trigrams[slot.clamp(min=0)], self.bigrams[last]).long()
        there, known = entries >= 0, entries.clamp(min=0)
        return (known // LEVELS).where(there, -1), self.probability[known % LEVELS].where(there, 0.0)


def home(first: Tensor, second: Tensor, buckets: int) -> Tensor:
    """A bucket for a pair of tokens; the pair turned round gives the other. Folded twice: a sum of products alone maps
    the regular patterns of token pairs to few buckets. No bit operations: ONNX and TensorRT have none for int64."""
    mixed = first * MIX[0] + second * MIX[1]
    mixed = (mixed + mixed // 2**15) % 2**31 * MIX[2]
    return (mixed + mixed // 2**29) % 2**31 % buckets


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
