"""The blocks of a GGUF file that our kernels multiply with as they are.

How each type lies is said by ggml's `ggml-common.h` and its `dequantize_row_...` functions.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from ...kernels.linear.groups import GROUP, Groups
from ..kept_groups import ROWS, KeptWeight
from ..quantized.normal import Rounded, Weight, four_bit_groups
from .file import GgufFile, GgufTensor, read_gguf

NAMES = {
    Type.Q8_0: "int8", Type.Q4_0: "int4", Type.Q4_1: "int4_least", Type.Q5_0: "int5", Type.Q5_1: "int5_least",
    Type.Q2_K: "q2_k", Type.Q3_K: "q3_k", Type.Q4_K: "q4_k", Type.Q5_K: "q5_k", Type.Q6_K: "q6_k",
    Type.IQ4_NL: "iq4_nl", Type.IQ4_XS: "iq4_xs", Type.MXFP4: "mxfp4", Type.NVFP4: "nvfp4",
}  # fmt: skip
FLOATS = {Type.F64, Type.F32, Type.F16, Type.BF16}


def kept_weights(file: Path) -> list[KeptWeight]:
    """The matrices of a file whose blocks are of a kind that we have."""
    found = read_gguf(file)
    tensors = [t for t in found.tensors.values() if t.kind in NAMES and len(t.shape) > 1]
    return [_kept(found, tensor) for tensor in tensors if _fits(tensor)]


def held_types(file: Path) -> list[str]:
    """The types of a file's tensors whose blocks can be taken over, by name."""
    held = {tensor.kind for tensor in read_gguf(file).tensors.values()}
    return [kind.name.lower() for kind in NAMES if kind in held]


def widened_tensors(file: Path) -> dict[str, list[str]]:
    """The quantised matrices of a file whose blocks are not taken over: their names by type."""
    found: dict[str, list[str]] = {}
    for tensor in read_gguf(file).tensors.values():
        if len(tensor.shape) > 1 and tensor.kind not in FLOATS and not (tensor.kind in NAMES and _fits(tensor)):
            found.setdefault(tensor.kind.name.lower(), []).append(tensor.name)
    return found


def wide_values(tensor: GgufTensor, exact: bool = True) -> Tensor:
    """The values of a tensor's rows, [N, K] float32. exact: not those of blocks that are taken over with scales that
    were rounded."""
    rows, depth = _rows(tensor), tensor.shape[-1] if tensor.shape else 1
    if tensor.factors is not None:
        weight = _with_factors(rows, tensor.factors)
        groups = None if exact else _groups_of(weight)
        return groups.values(depth) if groups else _values_of(weight, depth)
    if tensor.kind in NAMES and _fits(tensor):
        return read_blocks(tensor.kind, rows).values(depth)
    wide = gguf.dequantize(rows, tensor.kind)
    return torch.from_numpy(np.require(wide, requirements="W"))  # copies what is the mapped file itself


def read_blocks(kind: Type, rows: "np.typing.NDArray[Any]") -> Groups:
    """Rows of blocks as a file has them, uint8 [N, bytes]. kind: of NAMES."""
    blocks = torch.from_numpy(np.array(rows)).unflatten(-1, (-1, int(gguf.GGML_QUANT_SIZES[kind][1])))
    groups = READERS[kind](blocks)
    return groups._replace(kind=NAMES[kind])


def _kept(file: GgufFile, tensor: GgufTensor) -> KeptWeight:
    rows, factors = _rows(tensor), tensor.factors

    def read(index: Any) -> Groups:
        if factors is None:
            groups: Groups | None = read_blocks(tensor.kind, rows[index])
        else:
            groups = _groups_of(_with_factors(rows[index], factors[index]))
        file.release()
        assert groups is not None, "`_fits` has looked at all rows"
        return groups

    return KeptWeight(NAMES[tensor.kind], len(rows), tensor.shape[-1], read)


def _with_factors(rows: "np.typing.NDArray[Any]", factors: "np.typing.NDArray[np.float32]") -> Weight:
    """Rows of NVFP4, each times its factor: in groups where float16 holds the products, see `four_bit_groups`."""
    blocks = torch.from_numpy(np.array(rows)).unflatten(-1, (-1, int(gguf.GGML_QUANT_SIZES[Type.NVFP4][1])))
    scales, quants = blocks.split((4, 32), -1)
    wide = _unsigned_float8(scales).flatten(-2) * torch.from_numpy(factors[:, None].copy())
    return four_bit_groups("nvfp4", _bits_by(quants, 4, 8).flatten(-2), wide)


def _groups_of(weight: Weight) -> Groups | None:
    found = weight.groups if isinstance(weight, Rounded) else weight
    return found if isinstance(found, Groups) else None


def _values_of(weight: Weight, depth: int) -> Tensor:
    if isinstance(weight, Rounded):
        return weight.values
    return weight.values(depth) if isinstance(weight, Groups) else weight


def _rows(tensor: GgufTensor) -> "np.typing.NDArray[Any]":
    return tensor.data.reshape(-1, tensor.data.shape[-1])


def _fits(tensor: GgufTensor) -> bool:
    """Whether float16 holds all scales: MXFP4 has exponents beyond it, and factors may lead there."""
    if tensor.factors is not None:
        rows, factors = _rows(tensor), tensor.factors
        steps = (slice(at, at + ROWS) for at in range(0, len(rows), ROWS))
        return all(_groups_of(_with_factors(rows[step], factors[step])) is not None for step in steps)
    if tensor.kind != Type.MXFP4:
        return True
    exponents = _rows(tensor).reshape(-1, 17)[:, 0]
    return bool(((exponents >= E8M0_LEAST) & (exponents <= E8M0_MOST)).all())


def _half(block: Tensor) -> Tensor:
    """[..., 2 n] uint8 -> [..., n] float16."""
    return block.contiguous().view(torch.float16)


def _bits(held: Tensor, width: int) -> Tensor:
    """[..., n] uint8 -> [..., n * 8 / width]: the lowest bits of all bytes, then those above them."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8).view(-1, 1)
    return ((held.unsqueeze(-2) >> shifts) & (2**width - 1)).flatten(-2)


def _bits_by(held: Tensor, width: int, size: int) -> Tensor:
    """The same for each `size` bytes."""
    return _bits(held.unflatten(-1, (-1, size)), width).flatten(-2)


def _q8_0(block: Tensor) -> Groups:
    return Groups("", block[..., 2:] ^ 128, _half(block[..., :2]))  # from signed bytes to 128 more


def _nibbles(block: Tensor) -> Groups:  # q4_0, iq4_nl
    return Groups("", _bits(block[..., 2:], 4), _half(block[..., :2]))


def _q4_1(block: Tensor) -> Groups:
    return Groups("", _bits(block[..., 4:], 4), _half(block[..., :2]), _half(block[..., 2:4]))


def _q5_0(block: Tensor) -> Groups:
    return Groups("", _five(block[..., 2:]), _half(block[..., :2]))


def _q5_1(block: Tensor) -> Groups:
    return Groups("", _five(block[..., 4:]), _half(block[..., :2]), _half(block[..., 2:4]))


def _five(held: Tensor) -> Tensor:
    """A bit of each quant, those of eight in a byte, then four."""
    shifts = torch.arange(8, dtype=torch.uint8)
    high = ((held[..., :4].unsqueeze(-1) >> shifts) & 1).flatten(-2)
    return _bits(held[..., 4:], 4) | high << 4


def _q2_k(block: Tensor) -> Groups:
    scales, quants, factors = block.split((16, 64, 4), -1)
    signed = [part.to(torch.int8) for part in (scales & 15, scales >> 4)]
    return Groups("", _bits_by(quants, 2, GROUP), signed[0], signed[1], _with_negative(factors))


def _q3_k(block: Tensor) -> Groups:
    high, low, scales, factor = block.split((32, 64, 12, 2), -1)
    six = _bits(scales[..., :8], 4) | _bits(scales[..., 8:], 2) << 4
    return Groups("", _bits_by(low, 2, GROUP) | _bits(high, 1) << 2, (six - 32).view(torch.int8), None, _half(factor))


def _q4_k(block: Tensor) -> Groups:
    factors, scales, quants = block.split((4, 12, 128), -1)
    return Groups("", _bits_by(quants, 4, GROUP), *_six_bits(scales), _with_negative(factors))


def _q5_k(block: Tensor) -> Groups:
    factors, scales, high, low = block.split((4, 12, 32, 128), -1)
    return Groups("", _bits_by(low, 4, GROUP) | _bits(high, 1) << 4, *_six_bits(scales), _with_negative(factors))


def _q6_k(block: Tensor) -> Groups:
    low, high, scales, factor = block.split((128, 64, 16, 2), -1)
    quants = _bits_by(low, 4, 2 * GROUP) | _bits_by(high, 2, GROUP) << 4
    return Groups("", quants, scales.view(torch.int8), None, _half(factor))


def _iq4_xs(block: Tensor) -> Groups:
    factor, high, low, quants = block.split((2, 2, 4, 128), -1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    scales_high = ((high.unsqueeze(-1) >> shifts) & 3).flatten(-2)
    scales_low = ((low.unsqueeze(-1) >> torch.tensor([0, 4], dtype=torch.uint8)) & 15).flatten(-2)
    scales = ((scales_low | scales_high << 4) - 32).view(torch.int8)
    return Groups("", _bits_by(quants, 4, GROUP // 2), scales, None, _half(factor))


E8M0_LEAST, E8M0_MOST = 128 - 24, 128 + 15  # of a scale that float16 has; the values are doubled


def _mxfp4(block: Tensor) -> Groups:
    return Groups("", _bits(block[..., 1:], 4), torch.exp2(block[..., :1].float() - 128).half())


def _unsigned_float8(held: Tensor) -> Tensor:
    """Scales of NVFP4: float8 without a sign, in which 127 alone is no number and stands for 0."""
    wide = (held & 127).view(torch.float8_e4m3fn).float().nan_to_num(480)
    return torch.where(held == 127, 0, wide)


def _nvfp4(block: Tensor) -> Groups:
    scales, quants = block.split((4, 32), -1)
    halves = (_unsigned_float8(scales) / 2).half()  # the values are doubled
    groups = Groups("", _bits_by(quants, 4, 8), halves)
    return groups.each(lambda part: part.unflatten(-1, (2, -1)).flatten(-3, -2))  # two groups lie in a block


def _six_bits(held: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight least values: four of each whole, their upper bits those of the other four."""
    scales, least, both = held.split(4, -1)
    wide = (scales & 63, both & 15 | scales >> 6 << 4), (least & 63, both >> 4 | least >> 6 << 4)
    first, second = (torch.cat(parts, -1).view(torch.int8) for parts in wide)
    return first, second


def _with_negative(factors: Tensor) -> Tensor:
    """The factor of scales, and that of least values, which ggml subtracts."""
    halves = _half(factors)
    return torch.stack([halves[..., 0], -halves[..., 1]], -1)


READERS: dict[Type, Callable[[Tensor], Groups]] = {
    Type.Q8_0: _q8_0, Type.Q4_0: _nibbles, Type.Q4_1: _q4_1, Type.Q5_0: _q5_0, Type.Q5_1: _q5_1, Type.Q2_K: _q2_k,
    Type.Q3_K: _q3_k, Type.Q4_K: _q4_k, Type.Q5_K: _q5_k, Type.Q6_K: _q6_k, Type.IQ4_NL: _nibbles,
    Type.IQ4_XS: _iq4_xs, Type.MXFP4: _mxfp4, Type.NVFP4: _nvfp4,
}  # fmt: skip
