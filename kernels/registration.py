"""Registering an op whose body stays visible to the compiler: CPU tensors take the reference, CUDA tensors Triton.

This is `torch.library.triton_op` without its look at the kernels when the op is registered: that look imports Triton
(0.2-0.7 s, and a warning per op on a machine without it), which a CPU engine never needs. The rest is the same: the
op is one node in an exported graph (so that ONNX and TensorRT can map it to a function or a plugin), and Inductor
sees its body instead, plain aten on CPU and Triton kernels on CUDA.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._library.triton import set_wrap_triton_enabled
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.library import CustomOpDef


def traced_op(name: str, mutates_args: Iterable[str] = ()) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Register the decorated function as the op `name`; `mutates_args` names the tensors that it writes."""

    def register(body: Callable[..., Any]) -> CustomOpDef:
        def eager(*args: Any, **kwargs: Any) -> Any:
            with set_wrap_triton_enabled(False):  # launch directly: tracing a launch costs about a millisecond
                return body(*args, **kwargs)

        def trace(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
            if not torch._functorch.config.decompose_custom_triton_ops:  # torch.export: keep the op as one node
                return mode.__torch_dispatch__(op, types, args, kwargs)
            with mode:
                return body(*args, **kwargs)

        schema = torch.library.infer_schema(body, mutates_args=mutates_args)
        op = torch.library.custom_op(name, eager, mutates_args=mutates_args, schema=schema)
        op.register_fake(body)
        op.register_torch_dispatch(FunctionalTensorMode, trace)
        return op

    return register
