"""Has PyTorch's compiler generate less code, in less time and memory, that computes the same."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import sympy  # type: ignore[import-untyped]
from torch import Tensor
from torch._inductor import compile_fx, cpp_builder
from torch._inductor.codegen import cpp
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.virtualized import V

_OPTIMIZATION = "_get_optimization_cflags"
_STRIDE = "stride_at_vec_range"
_UNLIFT = "_unlift_graph"
_COPY = "clone_preserve_strides"
_INPUT_CHECKS = "generate_input_output_runtime_checks"


@contextlib.contextmanager
def no_input_checks() -> Iterator[None]:
    """Within it, generated code does not check its inputs, which it would do where an environment variable asks for it:
    half of all lines, and of the time of the C++ compiler. The session compares its tensors with the
    program's signature once."""
    if not hasattr(CppWrapperCpu, _INPUT_CHECKS):  # another version of PyTorch
        yield
        return
    generate = getattr(CppWrapperCpu, _INPUT_CHECKS)

    def generate_none(wrapper: CppWrapperCpu) -> None:
        with patch.object(V.graph, "graph_inputs", {}):
            generate(wrapper)

    with patch.object(CppWrapperCpu, _INPUT_CHECKS, generate_none):
        yield


@contextlib.contextmanager
def rules_made_once() -> Iterator[None]:
    """Within it, PyTorch's table of the dtypes of operations, of which it has one, is filled at its first use alone,
    not at each of thousands."""
    fill, filled = DtypePropagationOpsHandler.__init__, []

    def fill_once(handler: DtypePropagationOpsHandler) -> None:
        if handler not in filled:
            fill(handler)
            filled.append(handler)

    with patch.object(DtypePropagationOpsHandler, "__init__", fill_once):
        yield


@contextlib.contextmanager
def no_copies_of_weights() -> Iterator[None]:
    """Within it, weights are not copied before a program is compiled, which they are in case it writes to them: ours
    writes to none, and each process that compiles had a copy of all."""

    def same(tensor: Tensor) -> Tensor:
        return tensor

    unlift, known = getattr(compile_fx, _UNLIFT, None), hasattr(compile_fx, _COPY)
    if unlift is None or not known:
        yield
        return

    def unlift_alone(*given: Any) -> Any:
        with patch.object(compile_fx, _COPY, same):
            return unlift(*given)

    with patch.object(compile_fx, _UNLIFT, unlift_alone):
        yield


@contextlib.contextmanager
def strides_by_derivative() -> Iterator[None]:
    """Within it, how far apart an index lies for neighbouring values of a variable is its derivative, where it is a sum
    of products. PyTorch simplifies a difference, which took a fifth of all time in Python."""
    general = getattr(cpp, _STRIDE, None)
    if general is None:
        yield
        return

    def stride(index: sympy.Expr, variable: sympy.Symbol, *length: Any) -> sympy.Expr:
        slope = sympy.diff(index, variable) if _is_polynomial(index) else variable
        return general(index, variable, *length) if slope.has(variable) else slope

    with patch.object(cpp, _STRIDE, stride):
        yield


@functools.lru_cache(4096)
def _is_polynomial(index: sympy.Expr) -> bool:
    parts = (sympy.Symbol, sympy.Integer, sympy.Add, sympy.Mul, sympy.Pow)
    return all(isinstance(part, parts) for part in sympy.preorder_traversal(index))


@contextlib.contextmanager
def less_optimized() -> Iterator[None]:
    """Within it, the C++ compiler optimises kernels with -O2: with -O3 it takes a half longer, and they are as fast,
    since their loops are written as vectors."""
    flags = getattr(cpp_builder, _OPTIMIZATION, None)
    if flags is None:
        yield
        return

    def less(*given: Any, **named: Any) -> tuple[list[str], list[str]]:
        compiling, linking = flags(*given, **named)
        return ["O2" if flag == "O3" else flag for flag in compiling], linking

    with patch.object(cpp_builder, _OPTIMIZATION, less):
        yield


GENERATED_LESS = (
    no_input_checks,
    no_copies_of_weights,
    rules_made_once,
    strides_by_derivative,
    less_optimized,
)
