"""What PyTorch and the C++ compiler must do right here before a program is compiled for a CPU."""

import logging

import torch
from torch._inductor import config, cpu_vec_isa

from ...errors import BuildError
from ...kernels.native import detect_instruction_set, has_library, library_error

OLDEST_FOR_CPU = "2.13"
# Not for users: torch warns where it finds CUDA's compiler and no GPU.
logging.getLogger("torch.utils.cpp_extension").addFilter(lambda record: "No CUDA runtime" not in record.msg)


def check_torch(device: str) -> None:
    """Raises BuildError where PyTorch would compile a step for a CPU that accepts no draft, as 2.11 and 2.12 do
    (tests/kernels/test_lowering.py)."""
    if device == "cpu" and torch.__version__ < OLDEST_FOR_CPU:
        raise BuildError(
            f"torch: expected {OLDEST_FOR_CPU} or later to compile for a CPU, got {torch.__version__}, whose steps "
            f"accept no drafts; pip install 'torch>={OLDEST_FOR_CPU}', or build for another device or backend"
        )


def vector_instructions() -> str:
    """The vector instructions that Inductor's code uses, as it names them.

    By default Inductor compiles its headers with each set of them, to see whether the compiler can: 7 seconds, and
    scalar code without a word where a busy machine takes more than a minute. Our library, which was built with the
    processor's own, has shown that already.
    """
    here = True if detect_instruction_set() != "portable" and has_library() else None
    with config.patch({"cpp.vec_isa_ok": here}):
        return str(cpu_vec_isa.pick_vec_isa())  # known to this process, and to those that are forked, from now on


def check_library(weights: str) -> None:
    """Raises BuildError where these weights need our kernels, and they cannot be built. weights: the option."""
    if not has_library() and weights in ("int8", "int4"):
        raise BuildError(
            f"weights: expected auto or bfloat16 where our C++ kernels cannot be built, got {weights}: "
            f"{why_no_library()}"
        )


def why_no_library() -> str:
    """Why our kernels cannot be built."""
    reason, *_ = str(library_error()).splitlines()
    return reason
