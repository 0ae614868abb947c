"""How bigram and trigram tables lie in memory, and a look-up in plain torch.

An entry packs a token and its probability in one int32: token * 256 + level, probability exp(-level / 16), -1 where
there is none. Trigrams are hashed by the last two tokens; the pair is stored and compared, so that a look-up never
returns another pair's row. Letters: B batch, F frontier nodes, V vocabulary, Z hash slots, E entries of a row.
"""

import torch
from torch import Tensor

LEVELS = 256
LEVELS_PER_NAT = 16
EMPTY = -1

WIDTH = 8  # slots of a bucket; a pair lies in one of two buckets, the emptier when it came: 16 probes, 0.7 full
MIX = (2654435761, 2246822519, 2146121005)  # products stay inside int64


def mix(first: Tensor, second: Tensor) -> Tensor:
    """A number below 2**31 for a pair of tokens; the pair turned round gives another. Folded twice: a sum of products
    alone maps the regular patterns of token pairs to few numbers. No bit operations: ONNX and TensorRT have none for
    int64."""
    mixed = first * MIX[0] + second * MIX[1]
    mixed = (mixed + mixed // 2**15) % 2**31 * MIX[2]
    return (mixed + mixed // 2**29) % 2**31


def home(first: Tensor, second: Tensor, buckets: int) -> Tensor:
    """A bucket for a pair of tokens; the pair turned round gives the other."""
    return mix(first, second) % buckets


def look_up(
    previous: Tensor, last: Tensor, bigrams: Tensor, keys: Tensor, trigrams: Tensor, probability: Tensor
) -> tuple[Tensor, Tensor]:
    """What may follow two tokens.

    Args:
        previous, last: int64 [B, F], previous negative where there is none.
        bigrams: int32 [V, E]. keys: int64 [Z], previous * V + last. trigrams: int32 [Z, E]. probability: float32
            [LEVELS], of each level.

    Returns:
        tokens int64 [B, F, E], -1 where there is none, and their probabilities float32 [B, F, E].
    """
    before, buckets = previous.clamp(min=0), keys.shape[0] // WIDTH
    homes = torch.stack([home(before, last, buckets), home(last, before, buckets)], 2)  # [B, F, 2]
    slots = (homes[:, :, :, None] * WIDTH + torch.arange(WIDTH, device=last.device)).flatten(2)  # [B, F, 2 * WIDTH]
    key = (previous * bigrams.shape[0] + last)[:, :, None]
    slot = slots.where(keys[slots] == key, -1).amax(-1)  # both buckets may be the same one
    entries = torch.where((slot >= 0)[:, :, None], trigrams[slot.clamp(min=0)], bigrams[last]).long()
    there, known = entries >= 0, entries.clamp(min=0)
    return (known // LEVELS).where(there, -1), probability[known % LEVELS].where(there, 0.0)
