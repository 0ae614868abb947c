"""The blocks of a GGUF file that our kernels multiply with as they are."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from ...kernels.linear.groups import GROUP, Groups
from ..kept_groups import KeptWeight
from .file import GgufTensor, read_gguf

KINDS = {Type.Q8_0: "int8", Type.Q4_0: "int4", Type.Q4_1: "int4_least"}


def kept_weights(file: Path) -> list[KeptWeight]:
    """The matrices of q8_0, q4_0 and q4_1 in a file."""
    tensors = [t for t in read_gguf(file).tensors.values() if t.kind in KINDS and len(t.shape) > 1]
    return [_kept(tensor) for tensor in tensors]


def held_types(file: Path) -> list[str]:
    """The types of a file's tensors whose blocks can be taken over, by name."""
    held = {tensor.kind for tensor in read_gguf(file).tensors.values()}
    return [kind.name.lower() for kind in KINDS if kind in held]


def _kept(tensor: GgufTensor) -> KeptWeight:
    kind, rows = KINDS[tensor.kind], tensor.data.reshape(-1, tensor.data.shape[-1])
    return KeptWeight(kind, len(rows), tensor.shape[-1], lambda index: _groups(kind, rows[index]))


def _groups(kind: str, rows: "np.typing.NDArray[Any]") -> Groups:
    """Rows of blocks as the file has them: for each 32 elements a scale, a least value in q4_1, then quants."""
    blocks = torch.from_numpy(np.array(rows)).unflatten(-1, (-1, _block_bytes(kind)))
    scales = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
    if kind == "int8":
        return Groups(kind, blocks[..., 2:] ^ 128, scales, None)  # from signed bytes to 128 more
    least = blocks[..., 2:4].contiguous().view(torch.float16).squeeze(-1) if kind == "int4_least" else None
    quants = blocks[..., -GROUP // 2 :]
    return Groups(kind, torch.cat([quants & 15, quants >> 4], -1), scales, least)


def _block_bytes(kind: str) -> int:
    block_type = next(block_type for block_type, name in KINDS.items() if name == kind)
    return int(gguf.GGML_QUANT_SIZES[block_type][1])
