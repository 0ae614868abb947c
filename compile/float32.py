"""Run a low-precision model in float32 without a second copy of its weights."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

LOW = {torch.bfloat16, torch.float16}
GATHERS = {torch.ops.aten.embedding.default, torch.ops.aten.index.Tensor, torch.ops.aten.index_select.default}


class InFloat32(TorchDispatchMode):
    """Within it, every operation takes and makes float32 where it would take or make bfloat16 or float16.

    The weights stay as they are: an operation sees a float32 copy, which is gone when it returns. Tensors that an
    operation writes in place keep their dtype, and so do views: nothing is copied for them, nor for the rows of a table
    that are not read.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view:
            return func(*args, **(kwargs or {}))
        if func in GATHERS:
            return _raised(func(*args, **(kwargs or {})))
        written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        names = [a.name for a in func._schema.arguments]
        args = [arg if name in written else _raised(arg) for name, arg in zip(names, args, strict=False)]
        kwargs = {name: arg if name in written else _raised(arg) for name, arg in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _raised(argument: Any) -> Any:
    """A tensor, a dtype, or a list of these."""
    raised = tree_map_only(Tensor, lambda t: t.float() if t.dtype in LOW else t, argument)
    return torch.float32 if isinstance(argument, torch.dtype) and argument in LOW else raised
