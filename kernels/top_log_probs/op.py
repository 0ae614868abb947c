"""`specstep::top_log_probs`. See `reference.top_log_probs`."""

from typing import Any

from ..registration import traced_op
from . import reference


def _triton(*arguments: Any) -> Any:
    from . import triton

    return triton.top_log_probs(*arguments)


top_log_probs = traced_op("specstep::top_log_probs", reference.top_log_probs, cuda=_triton)
