"""`specstep::gather_ranks`, which the communicator of the calling thread carries out. See `reference.gather_ranks`.

It is one function of Python, which compiled programs call through PyTorch's dispatcher: a few dozen microseconds, but
nothing in a step, whose CUDA graph has the launches alone. It is registered without `torch.library.custom_op`, whose
first call imports the compiler.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_bound = threading.local()


@contextmanager
def gathering(ranks: int, gather: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within it, `gather` carries out the op on the calling thread, which is one of so many ranks. It is given a dense
    x."""
    _bound.ranks, _bound.gather = ranks, gather
    try:
        yield
    finally:
        del _bound.ranks, _bound.gather


def gather_ranks(x: Tensor, ranks: int) -> Tensor:
    """What every rank has of x [...], in the order of the ranks: [R, ...].

    x: of any dtype, and of the same shape on each of the ranks. Raises RuntimeError where the thread has no
    communicator of so many ranks.
    """
    result: Tensor = torch.ops.specstep.gather_ranks(x, ranks)
    return result


def _gather(x: Tensor, ranks: int) -> Tensor:
    bound = getattr(_bound, "ranks", 0)
    if bound != ranks:
        raise RuntimeError(f"gather_ranks: expected a communicator of {ranks} ranks on this thread, got one of {bound}")
    result: Tensor = _bound.gather(x.contiguous())
    return result


def _shaped(x: Tensor, ranks: int) -> Tensor:
    return x.new_empty((ranks, *x.shape))


_library = torch.library.Library("specstep", "FRAGMENT")
_library.define("gather_ranks(Tensor x, int ranks) -> Tensor")
_library.impl("gather_ranks", _gather, "CompositeExplicitAutograd")
torch.library.register_fake("specstep::gather_ranks", _shaped, lib=_library)
