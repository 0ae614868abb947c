"""`specstep::all_gather`, of the library of C++ kernels."""

import torch
from torch import Tensor

from ..native import load_library


def all_gather(x: Tensor, ranks: int) -> Tensor:
    """Every rank's x [..., N] beside each other, in the order of the ranks: [..., ranks * N]. See
    `reference.all_gather`.

    x: of any dtype, on the CPU, of the same shape on each of the ranks, which the communicator that is bound to the
    calling thread joins (`kernels.communicator`). Raises RuntimeError where another rank has ended, or no communicator
    of so many ranks is bound.
    """
    load_library()
    result: Tensor = torch.ops.specstep.all_gather(x, ranks)
    return result
