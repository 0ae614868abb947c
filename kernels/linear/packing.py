"""Packs weights as the C++ kernels read them: the same step along K of 16 outputs lies together."""

import torch
from torch import Tensor

from .groups import GROUP_KINDS, LAST, OUTPUTS, unpack_groups

STEPS = {torch.float32: 1, torch.bfloat16: 2}  # elements of K that lie together


def pack(weight: Tensor) -> Tensor:
    """Interleave a weight [..., N, K] by 16 outputs, zeros beyond N and K.

    float32 -> [..., ceil(N / 16), K, 16]; bfloat16 -> [..., ceil(N / 16), ceil(K / 2), 16, 2]. Contiguous. Raises
    KeyError for another dtype.
    """
    step = STEPS[weight.dtype]
    *leading, columns, depth = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -depth % step, 0, -columns % OUTPUTS))
    panels = padded.reshape(*leading, -(-columns // OUTPUTS), OUTPUTS, -(-depth // step), step).transpose(-2, -3)
    return (panels.squeeze(-1) if step == 1 else panels).contiguous()


def packed_shape(packed: Tensor, columns: int, depth: int) -> tuple[int, ...]:
    """The last dimensions that a weight [columns, depth] has when it is packed in the dtype of `packed`, which is a key
    of STEPS, or uint8 for one in groups, of the kind of `packed`. Raises ValueError."""
    panels = -(-columns // OUTPUTS)
    if packed.dtype in STEPS:
        step = STEPS[packed.dtype]
        return (panels, -(-depth // step), OUTPUTS, *([step] if step > 1 else []))
    if packed.dtype == torch.uint8 and packed.shape[-1] in list(LAST):  # a list: it may be symbolic
        kind = GROUP_KINDS[LAST[int(packed.shape[-1])]]
        return (panels, -(-depth // kind.step), *kind.shape)
    raise ValueError(
        f"packed weight: expected one of {list(STEPS)}, or uint8 with one of {list(LAST)} bytes last, got "
        f"{packed.dtype} {tuple(packed.shape)}"
    )


def unpack(packed: Tensor, columns: int, depth: int) -> Tensor:
    """The weight [..., columns, depth] that was packed; float32 for one in groups."""
    if packed.dtype == torch.uint8:
        return unpack_groups(packed, columns).values(depth)
    panels = packed.unsqueeze(-1) if STEPS[packed.dtype] == 1 else packed
    *leading, count, steps, outputs, step = panels.shape
    whole = panels.transpose(-2, -3).reshape(*leading, count * outputs, steps * step)
    return whole[..., :columns, :depth].contiguous()
