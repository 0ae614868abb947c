"""What `specstep::all_reduce` means."""

from collections.abc import Sequence

import torch
from torch import Tensor


def all_reduce(parts: Sequence[Tensor]) -> Tensor:
    """The sum of parts of one shape and dtype, one of each rank, in the order of the ranks: added in fp32, or in the
    dtype of the parts where that is wider, and rounded once to it."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)
