"""Memory that is taken where it is written to: addresses for far more than a machine has."""

import math
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

NO_RESERVE = 0x4000  # Linux: the system counts pages when they are written to, and not when they are asked for
OWN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE


def unreserved(shape: Sequence[int], dtype: torch.dtype) -> tuple[mmap.mmap, Tensor]:
    """Zeros of a shape, and the memory that they lie in. Raises OSError where the system refuses or is not Linux."""
    if sys.platform != "linux":
        raise OSError(f"expected Linux, got {sys.platform}")
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=OWN)
    with suppress(OSError):  # of a system that has none
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # a page of 2 MiB would hold a row's longest text
    return memory, torch.frombuffer(memory, dtype=dtype).view(*shape)
