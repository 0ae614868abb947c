"""Linear layers for a few rows on the CPU, at the speed at which memory delivers the weight."""

from .op import (
    LIBRARY_NAME,
    CompilerError,
    build_library,
    c_shims,
    detect_instruction_set,
    load_library,
    small_expert_linear,
    small_linear,
)

__all__ = [
    "LIBRARY_NAME",
    "CompilerError",
    "build_library",
    "c_shims",
    "detect_instruction_set",
    "load_library",
    "small_expert_linear",
    "small_linear",
]
