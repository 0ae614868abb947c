"""Tiny Llamas whose weights are quantised as publishers write them, and the numbers that those stand for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import save_model
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
Written = tuple[dict[str, Tensor], Tensor]  # the tensors of a layer by their last parts, and its weight in float32
NF4 = torch.tensor([
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
    0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
])  # fmt: skip
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def save_quantized(
    folder: Path, config: dict[str, Any], write: Callable[[Tensor], Written], seed: int = 0
) -> dict[str, Tensor]:
    """Write the model, with all projections quantised -> its weights by name, in float32."""
    save_model(folder, seed=seed, **SIZES)
    path = folder / "model.safetensors"
    state, values = load_file(path), dict[str, Tensor]()
    for name in [name for name in state if "proj.weight" in name]:
        parts, values[name] = write(state.pop(name))
        state |= {
            f"{name.removesuffix('.weight')}.{part}": tensor.clone().contiguous() for part, tensor in parts.items()
        }
    save_file(state, path, {"format": "pt"})
    config_path = folder / "config.json"
    config_path.write_text(json.dumps(json.loads(config_path.read_text()) | config))
    return values | {name: tensor for name, tensor in state.items() if "proj" not in name}


def random_quants(weight: Tensor, group: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quants [N, K], scales [N, G] of float16, zeros [N, G]."""
    quants = torch.randint(0, 2**bits, weight.shape)
    scales = (torch.rand(len(weight), weight.shape[1] // group) / 16 + 0.01).half()
    zeros = torch.randint(0, 2**bits, scales.shape)
    return quants, scales, torch.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros


def values_of(quants: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor) -> Tensor:
    """Element by element."""
    return (quants - zeros[:, group_of]).float() * scales.float()[:, group_of]


def words(rows: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[A, B] -> [A, B bits / 32] int32; order: which of a word's elements lies at each place, from the lowest bits."""
    count = 32 // bits
    order = order or tuple(range(count))
    out = torch.zeros(rows.shape[0], rows.shape[1] // count, dtype=torch.int64)
    for place, element in enumerate(order):
        out |= rows[:, element::count].long() << (bits * place)
    return torch.where(out >= 2**31, out - 2**32, out).int()


def awq(weight: Tensor) -> Written:
    quants, scales, zeros = random_quants(weight, 32, 4, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": words(quants.T, 4, order), "qzeros": words(zeros.T, 4, order), "scales": scales.T}
    return parts, values_of(quants, scales, zeros, torch.arange(weight.shape[1]) // 32)


def gptq(bits: int, symmetric: bool, ordered: bool, less: int) -> Callable[[Tensor], Written]:
    """less: than a zero is what the file has."""

    def write(weight: Tensor) -> Written:
        quants, scales, zeros = random_quants(weight, 32, bits, symmetric)
        group_of = torch.arange(weight.shape[1]) // 32
        group_of = group_of if ordered else group_of[torch.randperm(len(group_of))]
        parts = {
            "qweight": words(quants, bits).T,
            "qzeros": words(((zeros - less) % 2**bits).T, bits),
            "scales": scales.T,
            "g_idx": group_of.int(),
        }
        return parts, values_of(quants, scales, zeros, group_of)

    return write


def compressed_words(symmetric: bool) -> Callable[[Tensor], Written]:
    def write(weight: Tensor) -> Written:
        quants, scales, zeros = random_quants(weight, 32, 4, symmetric)
        parts = {
            "weight_packed": words(quants, 4),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        } | ({} if symmetric else {"weight_zero_point": words(zeros.T, 4).T})
        return parts, values_of(quants, scales, zeros, torch.arange(weight.shape[1]) // 32)

    return write


def compressed_bytes(weight: Tensor) -> Written:
    quants, scales = torch.randint(-128, 128, weight.shape), (torch.rand(len(weight), 1) / 99 + 0.001).half()
    return {"weight": quants.to(torch.int8), "weight_scale": scales}, quants.float() * scales.float()


def floats(shape: Callable[[Tensor], tuple[int, ...]], **more: Tensor) -> Callable[[Tensor], Written]:
    """float8 with scales of a shape."""

    def write(weight: Tensor) -> Written:
        eight, scales = (weight * 9).to(torch.float8_e4m3fn), torch.rand(shape(weight)) / 9 + 0.01
        return {"weight": eight, "weight_scale": scales, **more}, eight.float() * scales.reshape(-1, 1)

    return write


def nvfp4(packed: str, whole: str, divides: bool, scale: float = 0.02) -> Callable[[Tensor], Written]:
    """whole: the name of the scale of all, or of what it divides by."""

    def write(weight: Tensor) -> Written:
        codes = torch.randint(0, 16, weight.shape)
        scales = (torch.rand(len(weight), weight.shape[1] // 16) * 3 + 1).to(torch.float8_e4m3fn)
        values = E2M1[codes] * scales.float().repeat_interleave(16, 1) * scale
        data = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        return {packed: data, "weight_scale": scales, whole: torch.tensor([1 / scale if divides else scale])}, values

    return write


def mlx(weight: Tensor) -> Written:
    quants, scales, _ = random_quants(weight, 32, 4, symmetric=True)
    least = (torch.rand(scales.shape) / 9).half()
    group_of = torch.arange(weight.shape[1]) // 32
    values = quants.float() * scales.float()[:, group_of] + least.float()[:, group_of]
    return {"weight": words(quants, 4).view(torch.uint32), "scales": scales, "biases": least}, values


def nf4(weight: Tensor) -> Written:
    codes, largest = torch.randint(0, 16, (weight.numel(),)), torch.rand(weight.numel() // 64) + 0.1
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": list(weight.shape)}
    parts = {
        "weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8).reshape(-1, 1),
        "weight.absmax": largest,
        "weight.quant_map": NF4,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return parts, (NF4[codes] * largest.repeat_interleave(64)).reshape(weight.shape)


def int8_rows(weight: Tensor) -> Written:
    quants, largest = torch.randint(-127, 128, weight.shape), torch.rand(len(weight)) + 0.1
    parts = {"weight": quants.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, quants.float() * largest.reshape(-1, 1) / 127


def of_method(method: str, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **more}}


def compressed(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return of_method("compressed-tensors", config_groups={"group_0": group}, ignore=["lm_head"])


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
# Name -> the config, what writes a layer, and the kind of groups that are kept; None where the numbers are.
CASES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Written], str | None]] = {
    "awq": (of_method("awq", bits=4, group_size=32, version="gemm"), awq, "int4_least"),
    "gptq": (of_method("gptq", bits=4, group_size=32, sym=True), gptq(4, True, True, 1), "int4"),
    "gptq zeros": (of_method("gptq", bits=4, group_size=32), gptq(4, False, True, 1), "int4_least"),
    "gptq order": (of_method("gptq", bits=4, desc_act=True), gptq(4, True, False, 1), None),
    "gptq v2": (
        of_method("gptq", bits=4, checkpoint_format="gptq_v2"), gptq(4, False, True, 0), "int4_least",
    ),
    "gptq 8": (of_method("gptq", bits=8, group_size=32), gptq(8, True, True, 1), "int8"),
    "gptq 2": (of_method("gptq", bits=2, group_size=32), gptq(2, False, True, 1), None),
    "compressed int4": (compressed(**INT4, symmetric=True), compressed_words(True), "int4"),
    "compressed int4 zeros": (compressed(**INT4, symmetric=False), compressed_words(False), "int4_least"),
    "compressed int8": (compressed(num_bits=8, type="int", strategy="channel"), compressed_bytes, "int8"),
    "compressed fp8": (
        compressed(num_bits=8, type="float", strategy="channel"), floats(lambda w: (len(w), 1)), None,
    ),
    "compressed nvfp4": (
        compressed(num_bits=4, type="float", strategy="tensor_group", group_size=16),
        nvfp4("weight_packed", "weight_global_scale", divides=True), "nvfp4",
    ),
    "modelopt fp8": (
        of_method("modelopt", quant_algo="FP8"), floats(lambda w: (), input_scale=torch.ones(())), None,
    ),
    "modelopt nvfp4": (
        of_method("modelopt", quant_algo="NVFP4"), nvfp4("weight", "weight_scale_2", divides=False), "nvfp4",
    ),
    "fbgemm": (of_method("fbgemm_fp8"), floats(lambda w: (len(w), 1)), None),
    "mlx": ({"quantization": {"group_size": 32, "bits": 4}, "quantization_config": {"bits": 4}}, mlx, "int4_least"),
    "nf4": (of_method("bitsandbytes", load_in_4bit=True), nf4, None),
    "int8 rows": (of_method("bitsandbytes", load_in_8bit=True), int8_rows, None),
}  # fmt: skip
