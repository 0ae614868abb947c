"""Has PyTorch's compiler generate less code, in less time, that computes the same."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from torch._inductor import config
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.virtualized import V

# Checks of sizes that only run when an environment variable asks for them, and line numbers for debuggers.
UNCHECKED: dict[str, Any] = {"size_asserts": False, "aot_inductor.enable_line_tables": False}
# With how many others a kernel is compared that read the same buffer. Every layer's kernels read the positions; those
# that are worth fusing are neighbours. With 64, PyTorch's default, the pairs take a third of all time in Python.
FEW_PAIRS: dict[str, Any] = {"max_fusion_buffer_group_pairwise_attempts": 8}
OBJECTS = 100_000  # made between two collections of garbage: a compile makes millions, and few are in cycles

_INPUT_CHECKS = "generate_input_output_runtime_checks"


def known(settings: dict[str, Any]) -> dict[str, Any]:
    """Those settings that this version of PyTorch has."""
    names = config.get_config_copy()
    return {name: value for name, value in settings.items() if name in names}


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


def collect_rarely() -> None:
    """For the rest of a process that only compiles: leave what was there before to itself, and look for garbage
    rarely."""
    gc.freeze()
    gc.set_threshold(OBJECTS)
