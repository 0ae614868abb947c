"""`specstep::gumbel`. See `noise.gumbel`."""

import torch
from torch import Tensor

from .native import has_library
from .noise import gumbel as reference
from .registration import traced_op


def _cpu(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    if not has_library() or not seeds.dim() == positions.dim() == tokens.dim() == 3:
        return reference(seeds, positions, tokens)
    noise: Tensor = torch.ops.specstep.gumbel_native(seeds, positions, tokens)
    return noise


gumbel = traced_op("specstep::gumbel", reference, cpu=_cpu)
