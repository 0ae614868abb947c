"""What `specstep::gather_ranks` means."""

from collections.abc import Sequence

import torch
from torch import Tensor


def gather_ranks(parts: Sequence[Tensor]) -> Tensor:
    """Parts [...] of one shape and dtype, one of each rank, in the order of the ranks: [R, ...]."""
    return torch.stack([*parts])
