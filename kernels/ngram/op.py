"""`specstep::ngram`. See `reference.ngram`."""

from typing import Any

import torch

from ..native import has_library
from ..registration import traced_op
from . import reference


def _cpu(*arguments: Any) -> Any:
    return torch.ops.specstep.ngram_native(*arguments) if has_library() else reference.ngram(*arguments)


def _triton(*arguments: Any) -> Any:
    from . import triton

    return triton.ngram(*arguments)


ngram = traced_op("specstep::ngram", reference.ngram, cpu=_cpu, cuda=_triton)
