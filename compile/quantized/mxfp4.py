"""Blocks of MXFP4 as gpt-oss has them for its experts. transformers widens them; here they are found again.

NAME_blocks: uint8 [E, N, G, 16], two codes of E2M1 a byte, the lower half first. NAME_scales: uint8 [E, N, G],
exponents of two, 127 more.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ...kernels.linear.groups import Groups
from ..kept_groups import KeptWeight
from .files import places, read
from .normal import unpack_halves

METHOD = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
LEAST, MOST = 128 - 24, 128 + 15  # exponents of a half of the scale, which float16 has


def kept_blocks(folder: Path) -> list[KeptWeight]:
    """The weights of a directory whose scales our kernels hold."""
    found = [(blocks, scales) for _, blocks, scales in _weights(folder) if _fits(blocks, scales)]
    return [_kept(blocks.flatten(0, -3), scales.flatten(0, -2)) for blocks, scales in found]


def widened_blocks(folder: Path) -> list[str]:
    """The names of the others."""
    return [name for name, blocks, scales in _weights(folder) if not _fits(blocks, scales)]


def _weights(folder: Path) -> Iterator[tuple[str, Tensor, Tensor]]:
    files = places(folder)
    for whole in sorted(files):
        name = whole.removesuffix(BLOCKS)
        if name != whole and name + SCALES in files:
            yield name, read(files[whole], whole), read(files[name + SCALES], name + SCALES)


def _fits(blocks: Tensor, scales: Tensor) -> bool:
    outside = (scales < LEAST) | (scales > MOST)
    return blocks.shape == (*scales.shape, 16) and not bool((blocks[outside] & 0x77).any() or (scales == 255).any())


def _kept(blocks: Tensor, scales: Tensor) -> KeptWeight:
    """blocks: [N, G, 16]; scales: [N, G]. A block of zeros may have any scale."""

    def groups(quants: Tensor, exponents: Tensor) -> Groups:
        halves = torch.exp2(exponents.clamp(LEAST, MOST).float() - 128).half()
        return Groups(METHOD, unpack_halves(quants), halves.unsqueeze(-1))

    rows, steps, _ = blocks.shape
    return KeptWeight(METHOD, rows, steps * 32, lambda index: groups(blocks[index], scales[index]))
