"""Rows of a KV cache as integers of eight bits: [..., D] numbers become int8 [..., D + 2 * ceil(D / 32)]. Behind the D
integers lies a scale for each 32 of them: the upper half of a float32, low byte first. Zeros have the scale 0, as an
empty cache has.

A row depends on its own numbers alone, and has the same bits wherever it is written: no draft changes a text.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP, SCALE_BYTES = 32, 2
MOST = 127
LEAST = 1e-30  # what is below is 0: its scale would not be a normal number
LARGEST = 3e38  # 127 times the scale of a greater number may be infinite


def row_bytes(size: int) -> int:
    """Bytes of a row of `size` numbers."""
    return size + SCALE_BYTES * -(-size // GROUP)


def row_size(count: int) -> int:
    """Numbers in a row of `count` bytes."""
    return count - SCALE_BYTES * -(-count // (GROUP + SCALE_BYTES))


def quantize_rows(x: Tensor) -> Tensor:
    """x [..., D] of a floating-point dtype, finite -> int8 [..., row_bytes(D)]: x / scale rounded to nearest. The
    scale, the greatest number of a group / 127, is rounded up."""
    size = x.shape[-1]
    groups = pad(x.float().clamp(-LARGEST, LARGEST), (0, -size % GROUP)).unflatten(-1, (-1, GROUP))
    greatest = groups.abs().amax(-1, keepdim=True)
    bits = (torch.where(greatest > LEAST, greatest / MOST, 0.0).view(torch.int32) + 0xFFFF) & -0x10000
    scale = bits.view(torch.float32)
    rounded = torch.round(groups / torch.where(scale > 0, scale, 1.0)).to(torch.int8)
    scales = torch.cat([bits << 8 >> 24, bits >> 24], -1).to(torch.int8)  # each within -128 to 127
    return torch.cat([rounded.flatten(-2)[..., :size], scales.flatten(-2)], -1)


def widen_rows(rows: Tensor) -> Tensor:
    """int8 [..., row_bytes(D)] -> the numbers that they stand for, float32 [..., D]."""
    size = row_size(rows.shape[-1])
    low, high = (rows[..., size + byte :: SCALE_BYTES].to(torch.int32) for byte in range(SCALE_BYTES))
    scale = (high << 24 | (low & 0xFF) << 16).view(torch.float32)
    return rows[..., :size].float() * scale.repeat_interleave(GROUP, -1)[..., :size]
