"""Bits packed into int32 words, in plain torch.

No integer bit operation and no constant tensor, so that it also exports to ONNX and TensorRT.
"""

import torch
from torch import Tensor

BITS = 32


def word_count(count: int) -> int:
    """Words that hold `count` bits."""
    return (count + BITS - 1) // BITS


def pack_bits(mask: Tensor) -> Tensor:
    """Bool [..., M] -> int32 [..., ceil(M / 32)]; bit j of word w is element 32 * w + j, unused bits are 0."""
    count = mask.shape[-1]
    words = word_count(count)
    padded = torch.nn.functional.pad(mask.long(), (0, words * BITS - count))
    digits = padded.unflatten(-1, (words, BITS))
    for width in (1, 2, 4, 8, 16):  # join neighbours: 32 digits of 1 bit, 16 of 2, ... one of 32
        digits = digits[..., 0::2] + digits[..., 1::2] * 2**width
    unsigned = digits.squeeze(-1)  # [..., words], int64 in [0, 2**32)
    return torch.where(unsigned >= 2**31, unsigned - 2**32, unsigned).to(torch.int32)


def chain_bits(count: int, words: int, device: torch.device) -> Tensor:
    """The packed mask of a chain, int32 [count, words]: node i sees the nodes 0..i. `count` may be symbolic and at most
    32 * words, which is what `pack_bits` of a mask of unknown size could not promise."""
    return pack_bits(torch.arange(BITS * words, device=device) <= torch.arange(count, device=device)[:, None])


def unpack_bits(words: Tensor, count: int) -> Tensor:
    """Int32 [..., W] -> bool [..., count], the inverse of `pack_bits`; count <= 32 * W."""
    signed = words.long()
    digits = torch.where(signed < 0, signed + 2**32, signed).unsqueeze(-1)
    for width in (16, 8, 4, 2, 1):  # split in halves: one digit of 32 bits, 2 of 16, ... 32 of 1
        high = digits // 2**width  # torch.div with rounding exports to ONNX through fp32
        digits = torch.stack((digits - high * 2**width, high), dim=-1).flatten(-2)
    return digits.flatten(-2)[..., :count] > 0


def only_allowed(x: Tensor, allowed: Tensor, masked: Tensor) -> Tensor:
    """Logits x [B, N, V] with -inf for the tokens whose bit in allowed, int32 [B, N, ceil(V / 32)], is 0; rows whose
    masked, int64 [B], is 0 as they are."""
    out = ~unpack_bits(allowed, x.shape[2]) & (masked != 0)[:, None, None]
    return x.masked_fill(out, -torch.inf)
