"""`specstep::choose`. See `reference.choose`."""

from typing import Any

from ..registration import traced_op
from . import reference


def _triton(*arguments: Any) -> Any:
    from . import triton

    return triton.choose(*arguments)


choose = traced_op("specstep::choose", reference.choose, cuda=_triton)
