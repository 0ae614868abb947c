"""`specstep::packed_linear`, `packed_expert_linear` and `packed_embedding`, of the library of C++ kernels."""

import torch
from torch import Tensor

from ..native import load_library


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    """`x @ weight.T + bias`. The bits of an output do not depend on the other rows, on the threads, or on the columns
    that it is packed with.

    x: [..., K], bfloat16 or float32, on the CPU. weight: packed from [columns, K] of the same dtype (see `packing`).
    bias: [columns] or None. Returns [..., columns], contiguous, accumulated in fp32 and rounded once. Raises ValueError
    for what does not fit together. Inference only: there is no gradient.
    """
    load_library()
    result: Tensor = torch.ops.specstep.packed_linear(x, weight, bias, columns)
    return result


def packed_expert_linear(x: Tensor, weight: Tensor, experts: Tensor, columns: int) -> Tensor:
    """Row p of x times the weight of its expert, each weight in use read once; exact as `packed_linear` is.

    x: [P, K] on the CPU. weight: packed from [E, columns, K] of the same dtype. experts: [P] int64, each below E.
    Returns [P, columns]. Raises ValueError for what does not fit together, IndexError for an expert that is not there.
    Inference only.
    """
    load_library()
    result: Tensor = torch.ops.specstep.packed_expert_linear(x, weight, experts, columns)
    return result


def packed_embedding(weight: Tensor, ids: Tensor, columns: int, depth: int) -> Tensor:
    """Rows of a packed weight by their numbers.

    weight: packed from [columns, depth], on the CPU. ids: [...] int64, each below `columns`. Returns [..., depth].
    Raises ValueError for what does not fit together, IndexError for an id that is not there. Inference only.
    """
    load_library()
    result: Tensor = torch.ops.specstep.packed_embedding(weight, ids, columns, depth)
    return result
