"""How a process computes, as far as its user may choose: all ranks must do alike, to have the same bits."""

from typing import NamedTuple

import torch


class Arithmetic(NamedTuple):
    """PyTorch's settings."""

    flush_denormals: bool  # numbers that are too small to be normal are 0
    float32_products: str  # as `torch.set_float32_matmul_precision` takes it
    short_bfloat16_sums: bool  # on a GPU, sums of products of bfloat16 may be rounded in between
    short_float16_sums: bool


def arithmetic() -> Arithmetic:
    """That of the calling thread."""
    tiny = torch.full((1,), torch.finfo(torch.float32).tiny)
    products = torch.backends.cuda.matmul
    return Arithmetic(
        not bool(tiny.div(2).count_nonzero()),
        torch.get_float32_matmul_precision(),
        bool(products.allow_bf16_reduced_precision_reduction),
        bool(products.allow_fp16_reduced_precision_reduction),
    )


def compute_with(chosen: Arithmetic) -> None:
    """Have the process compute so, and of its threads the calling one and those that it starts."""
    torch.set_flush_denormal(chosen.flush_denormals)
    torch.set_float32_matmul_precision(chosen.float32_products)
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = chosen.short_bfloat16_sums
    products.allow_fp16_reduced_precision_reduction = chosen.short_float16_sums
