"""`specstep::shift`, and `specstep::shifted` for ONNX. See `reference.shift`."""

from typing import Any

import torch

from ..native import has_library
from ..registration import traced_op
from . import reference


def _cpu(*arguments: Any) -> None:
    if has_library():
        torch.ops.specstep.shift_native(*arguments)
    else:
        reference.shift(*arguments)


shift = traced_op("specstep::shift", reference.shift, cpu=_cpu, mutates_args=("window",))
shifted = traced_op("specstep::shifted", reference.shifted)
