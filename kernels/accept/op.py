"""`specstep::accept`. See `reference.accept`."""

from typing import Any

from ..registration import traced_op
from . import reference


def _triton(*arguments: Any) -> Any:
    from . import triton

    return triton.accept(*arguments)


accept = traced_op("specstep::accept", reference.accept, cuda=_triton)
