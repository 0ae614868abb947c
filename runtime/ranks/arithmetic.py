"""How a process rounds, as far as its user may choose it of PyTorch: all ranks must do alike, to have the same bits."""

from typing import Any, NamedTuple

import torch

SHORT_SUMS = tuple(
    f"allow_{dtype}_reduced_precision_reduction{also}" for dtype in ("bf16", "fp16") for also in ("", "_split_k")
)


class Arithmetic(NamedTuple):
    """PyTorch's settings."""

    flush_denormals: bool  # numbers that are too small to be normal are 0
    float32: tuple[str, str]  # what products of float32 are computed in, on a GPU and by oneDNN on a CPU
    short_sums: tuple[bool, ...]  # on a GPU, whether sums of products may be rounded in between, see SHORT_SUMS
    float16_sums: bool  # on a GPU, whether products of float16 are added in float16


def arithmetic() -> Arithmetic:
    """That of the calling thread."""
    tiny = torch.full((1,), torch.finfo(torch.float32).tiny)
    on_gpu, on_cpu = _products()
    return Arithmetic(
        not bool(tiny.div(2).count_nonzero()),
        (on_gpu.fp32_precision, on_cpu.fp32_precision),
        tuple(getattr(on_gpu, name) for name in SHORT_SUMS),
        on_gpu.allow_fp16_accumulation,
    )


def compute_with(chosen: Arithmetic) -> None:
    """Have the process compute so, and of its threads the calling one and those that it starts."""
    torch.set_flush_denormal(chosen.flush_denormals)
    on_gpu, on_cpu = _products()
    on_gpu.fp32_precision, on_cpu.fp32_precision = chosen.float32
    on_gpu.allow_bf16_reduced_precision_reduction = chosen.short_sums[:2]
    on_gpu.allow_fp16_reduced_precision_reduction = chosen.short_sums[2:]
    on_gpu.allow_fp16_accumulation = chosen.float16_sums


def _products() -> tuple[Any, Any]:
    """PyTorch's settings of products on a GPU and on a CPU."""
    backends: Any = torch.backends
    return backends.cuda.matmul, backends.mkldnn.matmul
