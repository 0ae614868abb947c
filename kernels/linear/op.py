"""`specstep::small_linear` and `specstep::small_expert_linear`, of the library of C++ kernels."""

import torch
from torch import Tensor

from ..native import load_library


def small_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, fast for 1 to 32 rows; more rows, and other dtypes, go to `aten::linear`.

    x: [..., K], bfloat16 or float32, on the CPU. weight: [N, K] of the same dtype, row-major. bias: [N] or None.
    Returns [..., N], contiguous, accumulated in fp32 and rounded once. Raises RuntimeError for shapes or dtypes that do
    not fit together. Inference only: there is no gradient.
    """
    load_library()
    result: Tensor = torch.ops.specstep.small_linear(x, weight, bias)
    return result


def small_expert_linear(x: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    """Row p of x times the weight of its expert, each weight in use read once.

    x: [P, K] on the CPU. weight: [E, N, K] of the same dtype; a transposed view of [E, K, N] will do. experts: [P]
    int64, each below E. Returns [P, N]. Raises ValueError for what does not fit together, IndexError for an expert that
    is not there. Inference only.
    """
    load_library()
    result: Tensor = torch.ops.specstep.small_expert_linear(x, weight, experts)
    return result
