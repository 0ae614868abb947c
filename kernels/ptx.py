"""A plugin's kernel as PTX with exactly the parameters that TensorRT passes, compiled without a GPU.

Triton adds parameters of its own behind the kernel's: pointers to scratch memory. TensorRT knows nothing of them, and
our kernels need no scratch: that is checked, and they are taken out.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .case import Case, compile_kernel

MAX_SHARED = 48 * 1024  # bytes a block may have without asking the driver for more, which TensorRT may not do


@dataclass(frozen=True)
class Binary:
    """A compiled kernel: its entry point, threads and shared bytes per block, the block sizes that its grid depends
    on, and its PTX."""

    entry: str
    threads: int
    shared: int
    constants: Mapping[str, int]
    ptx: str


_COMPILED: dict[str, Binary] = {}


def compile_ptx(case: Case, arch: int) -> Binary:
    """A plugin's case compiled for one architecture, e.g. 90; once per process, the layers of a model share it. Raises
    RuntimeError."""
    key = repr((case, arch))
    if key not in _COMPILED:
        _COMPILED[key] = _compile(case, arch)
    return _COMPILED[key]


def _compile(case: Case, arch: int) -> Binary:
    """Where a block wants more shared memory than it may have, loads are prefetched less, then tiles are smaller."""
    compiled = compile_kernel(case, arch)
    while compiled.metadata.shared > MAX_SHARED:
        case = smaller(case)
        compiled = compile_kernel(case, arch)
    meta = compiled.metadata
    if meta.global_scratch_size or meta.profile_scratch_size or meta.num_ctas != 1:
        raise RuntimeError(f"{case.name}: expected a kernel without scratch memory and clusters, got {meta}")
    visible = sum(name not in case.constants for name in case.kernel.arg_names)
    constants = {name: value for name, value in case.constants.items() if name.startswith("BLOCK_")}
    ptx = visible_parameters(compiled.asm["ptx"], meta.name, visible)
    return Binary(meta.name, 32 * meta.num_warps, meta.shared, constants, ptx)


def smaller(case: Case) -> Case:
    """The case with the next smaller use of shared memory. Raises RuntimeError where there is none."""
    options, constants = case.options, case.constants
    if options.get("num_stages", 1) > 1:
        options = options | {"num_stages": 1}
    elif constants.get("BLOCK_S", 16) > 16:
        constants = constants | {"BLOCK_S": constants["BLOCK_S"] // 2}
    elif constants.get("BLOCK_R", 16) > 16:
        constants = constants | {"BLOCK_R": constants["BLOCK_R"] // 2}
    else:
        raise RuntimeError(f"{case.name}: expected at most {MAX_SHARED} bytes of shared memory, got more")
    return Case(case.name, case.kernel, case.pointers, constants, options, case.aligned_strides)


def parameters(ptx: str, entry: str) -> list[str]:
    """The declarations of an entry point's parameters, e.g. ".param .u32 NAME". Raises RuntimeError."""
    return [line.strip() for line in _signature(ptx, entry)[1].split(",")]


def visible_parameters(ptx: str, entry: str, count: int) -> str:
    """The PTX with the first `count` parameters of its entry point alone. Raises RuntimeError if the code reads one of
    the others."""
    signature = _signature(ptx, entry)
    declared = parameters(ptx, entry)
    for hidden in declared[count:]:
        name = hidden.split()[-1]
        if ".u64" not in hidden or len(re.findall(rf"\b{re.escape(name)}\b", ptx)) != 1:
            raise RuntimeError(f"{entry}: expected {count} parameters and unused pointers, got {hidden} in use")
    if len(declared) < count:
        raise RuntimeError(f"{entry}: expected {count} parameters, got {len(declared)}")
    kept = ",\n".join(f"\t{line}" for line in declared[:count])
    return f"{ptx[: signature.start(1)]}\n{kept}\n{ptx[signature.end(1) :]}"


def _signature(ptx: str, entry: str) -> Any:
    found = re.search(rf"\.visible \.entry {re.escape(entry)}\((.*?)\)", ptx, flags=re.DOTALL)
    if found is None:
        raise RuntimeError(f"{entry}: expected an entry point of this name in the PTX, got none")
    return found
