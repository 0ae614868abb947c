"""The quantised blocks of a GGUF file, found again by the values that they stand for.

A file's tensors are widened when they are loaded, and their rows may be reordered, split, stacked or turned. Rows stay
whole, so each row of a weight is looked up among the rows of the file. Of several that are equal in bfloat16 the first
is taken.
"""

from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from ...kernels.linear.groups import GROUP, Groups
from .file import read_gguf

KINDS = {Type.Q8_0: "int8", Type.Q4_0: "int4", Type.Q4_1: "int4_least"}
ROWS = 4096  # hashed at once


class _Kind(NamedTuple):
    """Rows of one kind and depth: their hashes, sorted, and where each lies: its tensor and its row."""

    hashes: Tensor
    tensors: Tensor
    rows: Tensor


class GgufBlocks:
    """The rows of all tensors of q8_0, q4_0 and q4_1 in a file."""

    def __init__(self, file: Path):
        self.tensors = [t for t in read_gguf(file).tensors.values() if t.kind in KINDS and len(t.shape) > 1]
        self.kinds: dict[tuple[str, int], _Kind] = {}
        found: dict[tuple[str, int], list[tuple[Tensor, int]]] = {}
        for number, tensor in enumerate(self.tensors):
            depth = tensor.shape[-1]
            rows = tensor.data.reshape(-1, tensor.data.shape[-1])
            parts = [_hash(_groups(KINDS[tensor.kind], rows[at : at + ROWS]).values(depth).bfloat16())
                     for at in range(0, len(rows), ROWS)]  # fmt: skip
            found.setdefault((KINDS[tensor.kind], depth), []).append((torch.cat(parts), number))
        for key, parts_of in found.items():
            hashes, order = torch.cat([hashes for hashes, _ in parts_of]).sort(stable=True)
            tensors = torch.cat([torch.full_like(part, number) for part, number in parts_of])
            rows_of = torch.cat([torch.arange(len(part)) for part, _ in parts_of])
            self.kinds[key] = _Kind(hashes, tensors[order], rows_of[order])

    def kind(self, weight: Tensor) -> str | None:
        """The kind of blocks, of `groups.KINDS`, that all rows of a weight [..., N, K] have; None if there is none."""
        if weight.dtype != torch.bfloat16 or weight.numel() == 0:
            return None
        depth, hashes = weight.shape[-1], _hash(weight.reshape(-1, weight.shape[-1]))
        names = [name for (name, other) in self.kinds if other == depth]
        return next((name for name in names if self._find(name, depth, hashes) is not None), None)

    def groups(self, weight: Tensor) -> Groups:
        """The blocks of a weight [..., N, K] that has a kind. Raises ValueError for another one."""
        kind, depth = self.kind(weight), weight.shape[-1]
        if kind is None:
            raise ValueError(f"weight: expected rows of the GGUF file, got {tuple(weight.shape)} {weight.dtype}")
        flat = weight.reshape(-1, depth)
        places = self._find(kind, depth, _hash(flat))
        assert places is not None
        found = self.kinds[kind, depth]
        tensors, rows = found.tensors[places], found.rows[places]
        data = np.empty((len(rows), self.tensors[int(tensors[0])].data.shape[-1]), np.uint8)
        for number in tensors.unique().tolist():
            own = (tensors == number).numpy()
            whole = self.tensors[number].data
            data[own] = whole.reshape(-1, whole.shape[-1])[rows[own].numpy()]
        groups = _groups(kind, data)
        if not torch.equal(groups.values(depth).bfloat16(), flat):  # two rows of one hash
            raise ValueError("weight: expected the values of the GGUF file's blocks, got others")
        parts = (groups.quants, groups.scales, groups.least)
        shaped = [None if part is None else part.view(*weight.shape[:-1], *part.shape[1:]) for part in parts]
        assert shaped[0] is not None and shaped[1] is not None
        return Groups(kind, shaped[0], shaped[1], shaped[2])

    def _find(self, kind: str, depth: int, hashes: Tensor) -> Tensor | None:
        """Places of these rows in a kind; None where one is missing."""
        held = self.kinds[kind, depth].hashes
        places = torch.searchsorted(held, hashes).clamp(max=len(held) - 1)
        return places if torch.equal(held[places], hashes) else None


def held_types(file: Path) -> list[str]:
    """The types of a file's tensors whose blocks can be taken over, by name."""
    held = {tensor.kind for tensor in read_gguf(file).tensors.values()}
    return [kind.name.lower() for kind in KINDS if kind in held]


def _hash(rows: Tensor) -> Tensor:
    """[N, K] bfloat16 -> [N] int64: the same for the same bits, within a process."""
    held, width = rows.contiguous().view(torch.int16).numpy().tobytes(), rows.shape[-1] * 2
    return torch.tensor([hash(held[at : at + width]) for at in range(0, len(held), width)], dtype=torch.int64)


def _groups(kind: str, rows: "np.typing.NDArray[np.uint8]") -> Groups:
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
