"""`specstep::rank`. See `reference.rank`."""

from typing import Any

import torch

from ..native import has_library
from ..registration import traced_op
from . import reference


def _cpu(*arguments: Any) -> Any:
    return torch.ops.specstep.rank_native(*arguments) if has_library() else reference.rank(*arguments)


def _triton(*arguments: Any) -> Any:
    from . import triton

    return triton.rank(*arguments)


rank = traced_op("specstep::rank", reference.rank, cpu=_cpu, cuda=_triton)
