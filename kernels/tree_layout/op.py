"""`specstep::tree_layout`. See `reference.tree_layout`."""

from typing import Any

from ..registration import traced_op
from . import reference


def _triton(*arguments: Any) -> Any:
    from . import triton

    return triton.tree_layout(*arguments)


tree_layout = traced_op("specstep::tree_layout", reference.tree_layout, cuda=_triton)
