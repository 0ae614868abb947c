"""Registering an op whose body stays visible to the compiler.

This is `torch.library.triton_op` without its look at the kernels when the op is registered: that look imports Triton
(0.2-0.7 s, and a warning per op on a machine without it), which a CPU engine never needs. The rest is the same: the
op is one node in an exported graph (so that ONNX and TensorRT can map it to a function or a plugin), and Inductor
sees its body instead, plain aten on CPU and Triton kernels on CUDA.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._library.triton import set_wrap_triton_enabled
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.library import CustomOpDef
from torch.utils._sympy.numbers import int_oo

Function = Callable[..., Any]


def traced_op(
    name: str,
    reference: Function,
    *,
    cpu: Function | None = None,
    cuda: Function | None = None,
    check: Callable[..., None] | None = None,
    fake: Function | None = None,
    mutates_args: Iterable[str] = (),
) -> CustomOpDef:
    """Register the op `name`, with the signature and the meaning of its reference.

    cpu, cuda: what runs on tensors of that device, by default the reference. check: called with the arguments before
    all else, it raises ValueError where they do not fit together. fake: the op on tensors without data, where its body
    is no graph for every size. mutates_args: names of the tensors that it writes.
    """

    def body(*args: Any) -> Any:
        if check is not None:
            check(*args)
        first = next(argument for argument in args if isinstance(argument, Tensor))
        return ((cuda if first.is_cuda else cpu) or reference)(*args)

    def eager(*args: Any) -> Any:
        with set_wrap_triton_enabled(False):  # launch directly: tracing a launch costs about a millisecond
            return body(*args)

    def trace(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not torch._functorch.config.decompose_custom_triton_ops:  # torch.export: keep the op as one node
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            return body(*args, **kwargs)

    schema = torch.library.infer_schema(reference, mutates_args=mutates_args)
    op = torch.library.custom_op(name, eager, mutates_args=mutates_args, schema=schema)
    op.register_fake(fake or body)
    op.register_torch_dispatch(FunctionalTensorMode, trace)
    return op


def greatest(size: int) -> int:
    """The greatest value of a size: of one that a trace leaves open, its upper bound, or the largest int without one.
    What a kernel is compiled for may depend on it, but not on the size."""
    if not isinstance(size, torch.SymInt):
        return size
    upper = size.node.shape_env.bound_sympy(size.node.expr).upper
    return sys.maxsize if upper == int_oo else int(upper)
