"""One specialization of a Triton kernel, and its compilation without a GPU, which alone imports Triton."""

from dataclasses import dataclass, field
from typing import Any

PTX_VERSION = 87  # CUDA 12.8, the oldest that knows sm_120: a newer PTX would be refused by an older driver


@dataclass(frozen=True)
class Case:
    """What a kernel is specialized for: arguments that are neither pointers nor constants are 32-bit integers."""

    name: str  # for people
    kernel: Any  # the function under @triton.jit
    pointers: dict[str, str]  # tensor argument -> Triton's type, as "*fp16"
    constants: dict[str, Any]  # argument -> value that it is compiled with
    options: dict[str, int] = field(default_factory=dict)  # of the compiler, as num_warps
    aligned_strides: bool = True  # strides are multiples of 16 elements


def compile_kernel(case: Case, arch: int) -> Any:
    """Compile a case for one architecture, e.g. 90 for sm_90 -> Triton's compiled kernel: `asm["ptx"]`, `asm["cubin"]`,
    `metadata`. Raises RuntimeError where Triton interprets kernels."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not isinstance(case.kernel, triton.JITFunction):
        raise RuntimeError("TRITON_INTERPRET: expected unset, got 1; the interpreter replaces the compiler, unset it")
    names = case.kernel.arg_names
    kinds = {name: "constexpr" if name in case.constants else case.pointers.get(name, "i32") for name in names}
    # As at a launch: tensors start at a multiple of 16 bytes, and most strides are multiples of 16 elements.
    aligned = [name in case.pointers or (case.aligned_strides and name.startswith("stride_")) for name in names]
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if aligned[i] and kinds[name] != "constexpr"
    }
    source = ASTSource(fn=case.kernel, signature=kinds, constexprs=case.constants, attrs=attributes)
    options = {"num_warps": 4, "ptx_version": PTX_VERSION, "enable_fp_fusion": True, **case.options}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
