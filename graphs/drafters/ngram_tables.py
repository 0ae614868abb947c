"""What a corpus says about the next token: for the last token, and for the last two, the likeliest continuations.

An entry packs a token and its probability in one int32: token * 256 + level, probability exp(-level / 16), -1 where
there is none. Letters: B batch, F frontier nodes, V vocabulary, R pairs that have a row, Z hash slots, K entries of a
row.
"""

import torch
from torch import Tensor, nn

LEVELS = 256
LEVELS_PER_NAT = 16
EMPTY = -1

PROBES = 8  # slots that one lookup compares, side by side
LOAD = 0.7  # rows per slot to start with; the table grows until every row is within its probes
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
        slots, self.homes = place(pairs.long())
        size = self.homes + PROBES - 1
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
        slots = home(previous.clamp(min=0), last, self.homes)[:, :, None] + torch.arange(PROBES, device=last.device)
        hit = self.keys[slots] == (previous * self.vocabulary + last)[:, :, None]  # [B, F, PROBES], at most one
        slot = (slots * hit).sum(-1)
        entries = torch.where(hit.any(-1, keepdim=True), self.trigrams[slot], self.bigrams[last]).long()
        probabilities = self.probability[entries.clamp(min=0) % LEVELS].where(entries >= 0, 0.0)
        return entries.div(LEVELS, rounding_mode="floor"), probabilities


def home(previous: Tensor, last: Tensor, homes: int) -> Tensor:
    """The first of the slots where a pair of tokens may lie. Folded twice: a sum of products alone maps the regular
    patterns of token pairs to few slots."""
    mixed = previous * MIX[0] + last * MIX[1]
    mixed = (mixed ^ (mixed >> 15)) & 0x7FFFFFFF
    mixed = mixed * MIX[2]
    return ((mixed ^ (mixed >> 29)) & 0x7FFFFFFF) % homes


def place(pairs: Tensor) -> tuple[Tensor, int]:
    """pairs [R, 2] -> a slot for each [R], none shared, at most PROBES - 1 past its home; and the number of homes."""
    homes = max(1, int(len(pairs) / LOAD)) | 1
    while True:
        first = home(pairs[:, 0], pairs[:, 1], homes)
        slots = torch.full((len(pairs),), -1)
        owner = torch.full((homes + PROBES - 1,), -1)
        waiting = torch.arange(len(pairs))
        for probe in range(PROBES):
            wanted = first[waiting] + probe
            free = owner[wanted] < 0
            owner[wanted[free]] = waiting[free]  # one of those that want the same slot gets it
            won = owner[wanted] == waiting
            slots[waiting[won]] = wanted[won]
            waiting = waiting[~won]
        if not len(waiting):
            return slots, homes
        homes = int(homes * 1.2) | 1
