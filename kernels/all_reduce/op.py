"""`specstep::all_reduce`, of the library of C++ kernels."""

import torch
from torch import Tensor

from ..native import load_library


def all_reduce(x: Tensor, ranks: int) -> Tensor:
    """The sum of every rank's x, in the order of the ranks: the same bits on all. See `reference.all_reduce`.

    x: [...], float32, bfloat16 or float16, on the CPU, of the same shape on each of the ranks, which the communicator
    that is bound to the calling thread joins (`kernels.communicator`). Raises RuntimeError where another rank has
    ended, or no communicator of so many ranks is bound.
    """
    load_library()
    result: Tensor = torch.ops.specstep.all_reduce(x, ranks)
    return result
