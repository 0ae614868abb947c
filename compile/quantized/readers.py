"""What publishers write for one linear layer -> its weight in normal form.

Each reader takes the layer's tensors by the last part of their names, and the settings of the checkpoint's config. It
raises ValueError for what it does not know.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .normal import Weight, four_bit_groups, scaled, unpack_halves, unpack_words, with_least

LayerTensors = Mapping[str, Tensor]
Settings = Mapping[str, Any]
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # which of a word's eight is output 0, 1, ...


class Reader(NamedTuple):
    """key: a part that a layer of a quantised weight has, and no other. read: see above. parts: those that are read, or
    known to be of no use to a weight: scales of activations."""

    key: str
    read: Callable[[LayerTensors, Settings], Weight]
    parts: tuple[str, ...]


def awq(parts: LayerTensors, settings: Settings) -> Weight:
    """AutoAWQ's GEMM: qweight [K, N / 8], qzeros [G, N / 8] int32; scales [G, N]."""
    if str(settings.get("version", "gemm")).lower() != "gemm" or settings.get("bits", settings.get("w_bit", 4)) != 4:
        raise ValueError(f"version gemm of 4 bits, got {settings.get('version')} of {settings.get('bits')}")
    quants, zeros = (
        unpack_words(parts[name], 4).unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1).T
        for name in ("qweight", "qzeros")
    )
    return scaled(quants, parts["scales"].T, zeros, 4)


def gptq(parts: LayerTensors, settings: Settings) -> Weight:
    """qweight [K bits / 32, N], qzeros [G, N bits / 32] int32; scales [G, N]; g_idx [K], the group of each input."""
    bits = settings.get("bits", 4)
    if bits not in (2, 4, 8):
        raise ValueError(f"2, 4 or 8 bits, got {bits}")
    if settings.get("rotation"):
        raise ValueError(f"no rotation of what layers read, got {settings['rotation']}")
    if settings.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
        raise ValueError(f"checkpoint_format gptq or gptq_v2, got {settings['checkpoint_format']}")
    quants = unpack_words(parts["qweight"].T.contiguous(), bits)
    less = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1  # than the zero is what the first format has
    zeros = unpack_words(parts["qzeros"], bits).T.int() + less & 2**bits - 1
    return _of_groups(quants, parts["scales"].T, zeros, bits, parts.get("g_idx"))


def compressed(parts: LayerTensors, settings: Settings) -> Weight:
    """weight_packed [N, K bits / 32] int32, or weight of int8 or float8; weight_scale [N, G], [N, 1] or [1];
    weight_zero_point; weight_g_idx. settings: `weights` of the layer's group of the config."""
    scales, bits = parts["weight_scale"], settings["num_bits"]
    if settings["type"] == "float":
        if bits == 4:
            return _four_bit_floats(parts["weight_packed"], scales, 1 / parts["weight_global_scale"].float())
        return float8(parts, settings)
    scales = scales.reshape(len(scales), -1) if scales.dim() else scales.reshape(1, 1)
    middle = 2 ** (bits - 1)
    if "weight_packed" in parts:
        depth = int(parts["weight_shape"][1])
        if bits not in (2, 4, 8) or parts["weight_packed"].shape[1] != -(-depth * bits // 32):
            words = parts["weight_packed"].shape[1]
            raise ValueError(f"{depth} numbers of 2, 4 or 8 bits in a row, got {words} words of {bits} bits each")
        quants = unpack_words(parts["weight_packed"], bits)[:, :depth]
    elif parts["weight"].dtype != torch.int8:
        raise ValueError(f"weight of int8, got {parts['weight'].dtype}")
    else:
        quants = (parts["weight"].int() + middle).to(torch.uint8)
    zeros = torch.full_like(scales, middle, dtype=torch.int32)
    if (zero := parts.get("weight_zero_point")) is not None:
        packed = zero.dtype == torch.int32
        zeros = unpack_words(zero.T.contiguous(), bits).T[: len(scales)].int() if packed else zero.int() + middle
        zeros = zeros.reshape(scales.shape)
    scales, zeros = (each.expand(len(quants), -1) for each in (scales, zeros))
    return _of_groups(quants, scales, zeros, bits, parts.get("weight_g_idx"))


def float8(parts: LayerTensors, settings: Settings) -> Weight:
    """weight [N, K] of float8; weight_scale of the whole, of each output, or of blocks [N / b, K / c]."""
    if not parts["weight_scale"].is_floating_point():
        raise ValueError(f"weight_scale of floats, got {parts['weight_scale'].dtype}")
    weight, scales = parts["weight"].float(), parts["weight_scale"].float()
    if scales.numel() == 1 or scales.shape in ((len(weight),), (len(weight), 1)):
        return weight * scales.reshape(-1, 1)
    rows, columns = settings.get("block_structure") or [
        -(-size // count) for size, count in zip(weight.shape, scales.shape, strict=True)
    ]
    if scales.shape != (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)):
        raise ValueError(f"a scale for each block of {rows} x {columns}, got {tuple(scales.shape)}")
    wide = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return weight * wide[: weight.shape[0], : weight.shape[1]]


def modelopt(parts: LayerTensors, settings: Settings) -> Weight:
    """FP8: as `float8`. NVFP4: weight [N, K / 2] of two codes, weight_scale [N, K / 16] of float8, weight_scale_2."""
    if "weight_scale_2" in parts:
        return _four_bit_floats(parts["weight"], parts["weight_scale"], parts["weight_scale_2"].float())
    return float8(parts, settings)


def mlx(parts: LayerTensors, settings: Settings) -> Weight:
    """weight [N, K bits / 32] uint32; scales, biases [N, G]."""
    bits = settings["bits"]
    if bits not in (2, 4, 8) or settings.get("mode", "affine") != "affine":
        raise ValueError(f"mode affine of 2, 4 or 8 bits, got {settings.get('mode', 'affine')} of {bits}")
    return with_least(unpack_words(parts["weight"].view(torch.int32), bits), parts["scales"], parts["biases"], bits)


def four_bit_table(parts: LayerTensors, settings: Settings) -> Weight:
    """bitsandbytes' nf4 and fp4: weight [N K / 2, 1] of two codes, the upper half of a byte first; weight.absmax of
    each block, itself in eight bits where there is a nested one."""
    state = json.loads(bytes(next(value for name, value in parts.items() if "quant_state" in name).tolist()))
    codes = unpack_halves(parts["weight"].flatten()).unflatten(0, (-1, 2)).flip(-1).flatten()
    largest = parts["weight.absmax"]
    if "weight.nested_absmax" in parts:
        wide = parts["weight.nested_quant_map"].float()[largest.long()]
        outer = parts["weight.nested_absmax"].float().repeat_interleave(state["nested_blocksize"])[: len(wide)]
        largest = wide * outer + state["nested_offset"]
    values = parts["weight.quant_map"].float()[codes.long()]
    return (values * largest.float().repeat_interleave(state["blocksize"])[: len(values)]).reshape(state["shape"])


def int8_rows(parts: LayerTensors, settings: Settings) -> Weight:
    """bitsandbytes' LLM.int8: weight [N, K] int8; SCB [N], the largest of each output; weight_format, 0 for rows."""
    if (order := parts.get("weight_format")) is not None and int(order) != 0:
        raise ValueError(f"weight_format 0, row after row, got {int(order)}; save the model again with bitsandbytes")
    return parts["weight"].float() * (parts["SCB"].float() / 127).reshape(-1, 1)


def _four_bit_floats(data: Tensor, scales: Tensor, whole: Tensor) -> Weight:
    """Two codes of E2M1 a byte, scales of float8 along K, and one of the whole."""
    return four_bit_groups("nvfp4", unpack_halves(data), scales.float() * whole)


def _of_groups(quants: Tensor, scales: Tensor, zeros: Tensor, bits: int, group_of: Tensor | None) -> Weight:
    """(quants - zeros) * scales. group_of [K]: of each input, where they are not in order (act-order)."""
    size = quants.shape[1] // scales.shape[1]
    if group_of is not None and bool((group_of == -1).all()):
        group_of = None  # compressed-tensors writes so where there is no act-order
    if group_of is not None and not bool(((group_of >= 0) & (group_of < scales.shape[1])).all()):
        raise ValueError(f"groups below {scales.shape[1]} for each input, got {group_of.unique().tolist()[:3]}")
    if group_of is None or torch.equal(group_of.long(), torch.arange(quants.shape[1]) // size):
        return scaled(quants, scales, zeros, bits)
    return (quants.float() - zeros.float()[:, group_of.long()]) * scales.float()[:, group_of.long()]


_ACTIVATIONS = (
    "input_scale", "input_global_scale", "input_zero_point", "k_scale", "v_scale", "q_scale", "output_scale",
)  # fmt: skip
_BNB = ("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")
READERS: dict[str, Reader] = {
    "awq": Reader("qweight", awq, ("qweight", "qzeros", "scales")),
    "gptq": Reader("qweight", gptq, ("qweight", "qzeros", "scales", "g_idx")),
    "compressed-tensors": Reader(
        "weight_scale", compressed,
        ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
         "weight_global_scale", *_ACTIVATIONS),
    ),
    "modelopt": Reader("weight_scale", modelopt, ("weight", "weight_scale", "weight_scale_2", *_ACTIVATIONS)),
    "fbgemm_fp8": Reader("weight_scale", float8, ("weight", "weight_scale", "input_scale_ub")),
    "mlx": Reader("scales", mlx, ("weight", "scales", "biases")),
    "bitsandbytes 4-bit": Reader(
        "weight.absmax", four_bit_table,
        (*_BNB, "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4"),
    ),
    "bitsandbytes 8-bit": Reader("SCB", int8_rows, ("weight", "SCB", "weight_format")),
}  # fmt: skip
