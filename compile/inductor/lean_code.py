"""Has PyTorch's compiler generate less code, in less time, that computes the same."""

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.virtualized import V

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
