"""The sum of what ranks have: `specstep::all_reduce`, of the library of C++ kernels, and what is gathered on a GPU."""

import torch
from torch import Tensor

from ..gather_ranks.op import gather_ranks
from ..native import load_library
from . import reference


def all_reduce(x: Tensor, ranks: int) -> Tensor:
    """The sum of every rank's x, in the order of the ranks: the same bits on all. See `reference.all_reduce`.

    x: [...], float32, bfloat16 or float16, of the same shape on each of the ranks, which the communicator that is bound
    to the calling thread joins: `kernels.communicator` on a CPU, `kernels.nccl` on GPUs, where each gets all parts and
    adds them. Raises RuntimeError where another rank has ended, or no communicator of so many ranks is bound.
    """
    if x.is_cuda:
        return reference.all_reduce(gather_ranks(x, ranks).unbind())
    load_library()
    result: Tensor = torch.ops.specstep.all_reduce(x, ranks)
    return result
