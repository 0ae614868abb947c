"""What PyTorch and the C++ compiler must do right here before a program is compiled for a CPU."""

import torch
from torch._inductor import cpu_vec_isa

from ...errors import BuildError
from ...kernels.native import detect_instruction_set, has_library, library_error

OLDEST_FOR_CPU = "2.13"


def check_torch(device: str) -> None:
    """Raises BuildError where PyTorch would compile a step for a CPU that accepts no draft, as 2.11 and 2.12 do
    (tests/kernels/test_lowering.py)."""
    if device == "cpu" and torch.__version__ < OLDEST_FOR_CPU:
        raise BuildError(
            f"torch: expected {OLDEST_FOR_CPU} or later to compile for a CPU, got {torch.__version__}, whose steps "
            f"accept no drafts; pip install 'torch>={OLDEST_FOR_CPU}', or build for another device or backend"
        )


def check_vector_instructions() -> None:
    """Find the vector instructions that the compiler may use; forked processes know them then. Inductor tries them out
    in a process that it gives a minute: where that fails, on a very busy machine, it compiles scalar code without a
    word. Raises BuildError."""
    if detect_instruction_set() != "portable" and cpu_vec_isa.pick_vec_isa() == cpu_vec_isa.invalid_vec_isa:
        raise BuildError(
            f"compile: expected code with {detect_instruction_set()} instructions, got none: the compiler's trial of "
            "them failed or took more than a minute; build again when the machine is less busy"
        )


def check_library(weights: str) -> None:
    """Raises BuildError where an engine without our kernels cannot be what the user asked for. weights: his option."""
    if not has_library() and weights in ("int8", "int4"):
        raise BuildError(
            f"weights: expected auto or bfloat16 where our C++ kernels cannot be built, got {weights}: "
            f"{why_no_library()}"
        )


def why_no_library() -> str:
    """Why our kernels cannot be built."""
    reason, *_ = str(library_error()).splitlines()
    return reason
