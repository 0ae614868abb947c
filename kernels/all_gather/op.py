"""What ranks have beside each other: `specstep::all_gather`, of the library of C++ kernels, and `gather_ranks` on a
GPU."""

import torch
from torch import Tensor

from ..gather_ranks.op import gather_ranks
from ..native import load_library
from . import reference


def all_gather(x: Tensor, ranks: int) -> Tensor:
    """Every rank's x [..., N] beside each other, in the order of the ranks: [..., ranks * N]. See
    `reference.all_gather`.

    x: of any dtype, of the same shape on each of the ranks, which the communicator that is bound to the calling thread
    joins: `kernels.communicator` on a CPU, `kernels.nccl` on GPUs. Raises RuntimeError where another rank has ended, or
    no communicator of so many ranks is bound.
    """
    if x.is_cuda:
        return reference.all_gather(gather_ranks(x, ranks).unbind())
    load_library()
    result: Tensor = torch.ops.specstep.all_gather(x, ranks)
    return result
