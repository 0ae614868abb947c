"""Compile every Triton kernel to machine code without a GPU and report registers and spills.

    python -m specstep.kernels.compile_cubin [--arch 80 90 120] [--out FOLDER]

The sizes are those that the launchers choose. `stack` is the bytes a thread keeps in local memory: these kernels have
no local arrays, so it is what spilled.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARCHITECTURES = (80, 90, 120)  # A100; H100 and H200; RTX 50
PTX_VERSION = 87  # CUDA 12.8, the oldest that knows sm_120: a newer PTX would be refused by an older driver


@dataclass(frozen=True)
class Case:
    """One specialization of a kernel: arguments that are neither pointers nor constants are 32-bit integers."""

    name: str
    kernel: Any
    pointers: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)
    aligned_strides: bool = True  # strides are multiples of 16 elements


@dataclass(frozen=True)
class Usage:
    name: str
    arch: int
    registers: int
    stack: int
    shared: int
    cubin: bytes = field(repr=False)


def cases() -> Iterator[Case]:
    """Each kernel as launched for a tree of 64 nodes and a root, T = 65."""
    from .accept.triton import accept_kernel
    from .tree_layout.triton import tree_layout_kernel

    tree = {"parents": "*i64", "valid": "*i1", "ancestors": "*i32", "depths": "*i64"}
    yield Case("tree_layout", tree_layout_kernel, tree, {"BLOCK_T": 32, "BLOCK_W": 4}, {"num_warps": 1})
    tokens = {"tokens": "*i64", "choice": "*i64", "path": "*i64", "accepted": "*i64"}
    yield Case("accept", accept_kernel, tree | tokens, {"BLOCK_T": 128, "BLOCK_W": 4, "BLOCK_P": 16})
    for dtype in ("fp16", "fp32"):
        yield _compact_case(dtype)
    sizes = (("fp16", 64), ("bf16", 80), ("bf16", 128), ("bf16", 256), ("fp32", 64), ("fp32", 128), ("fp32", 256))
    for dtype, head_dim in sizes:
        yield _attention_case(dtype, head_dim, rows=4 * 65)
    yield from (_attention_case("bf16", 128, rows) for rows in (4, 32))
    yield _attention_case("bf16", 192, rows=65, value_size=128)
    yield _attention_case("bf16", 128, rows=4 * 65, window=4096, softcap=50.0)
    yield from (_merge_case(dtype, head_dim) for dtype, head_dim in (("bf16", 128), ("fp32", 256)))


def _compact_case(dtype: str) -> Case:
    from .compact.triton import CACHES_PER_LAUNCH, compact_kernel

    pointers = {"lengths": "*i64", "path": "*i64", "accepted": "*i64"}
    pointers |= {f"cache_{i}": f"*{dtype}" for i in range(CACHES_PER_LAUNCH)}
    constants = {"CACHES": CACHES_PER_LAUNCH, "D": 128, "BLOCK_P": 16, "BLOCK_D": 128, "stride_d": 1}
    return Case(f"compact {dtype} D=128 x{CACHES_PER_LAUNCH}", compact_kernel, pointers, constants)


def _attention_case(
    dtype: str, head_dim: int, rows: int, window: int = 0, softcap: float = 0.0, value_size: int = 0
) -> Case:
    from .tree_attention.triton import attend_split_kernel, blocks

    pointers = dict.fromkeys(("q", "k", "v"), f"*{dtype}")
    pointers |= {"lengths": "*i64", "depths": "*i64", "ancestors": "*i32", "key_depths": "*i64"}
    pointers |= {"split_out": "*fp32", "split_norm": "*fp32"}
    launch = blocks(rows, head_dim, value_size or head_dim, 4 if dtype == "fp32" else 2)
    options = {name: launch.pop(name) for name in ("num_warps", "num_stages")}
    constants = {
        "SCALE": head_dim**-0.5,
        "SOFTCAP": softcap,
        "WINDOW": window,
        "D": head_dim,
        "DV": value_size or head_dim,
        **launch,
    }
    constants |= {"stride_qd": 1, "stride_kd": 1, "stride_vd": 1}
    name = f"attention {dtype} D={head_dim} rows={launch['BLOCK_R']}" + (" window softcap" if window else "")
    return Case(name, attend_split_kernel, pointers, constants, options)


def _merge_case(dtype: str, head_dim: int) -> Case:
    from .tree_attention.triton import MAX_SPLITS, merge_splits_kernel

    pointers = {"split_out": "*fp32", "split_norm": "*fp32", "sinks": f"*{dtype}", "out": f"*{dtype}"}
    constants = {"HAS_SINKS": True, "DV": head_dim, "BLOCK_DV": head_dim, "BLOCK_N": MAX_SPLITS}
    return Case(f"attention merge {dtype} D={head_dim}", merge_splits_kernel, pointers, constants)


def compile_case(case: Case, arch: int) -> Usage:
    """Compile one case for one architecture, e.g. 90 for sm_90, and measure it."""
    compiled = compile_kernel(case, arch)
    registers, stack = _resources(compiled.asm["cubin"])
    return Usage(case.name, arch, registers, stack, compiled.metadata.shared, compiled.asm["cubin"])


def compile_kernel(case: Case, arch: int) -> Any:
    """Triton's compiled kernel: `asm["ptx"]`, `asm["cubin"]`, `metadata`."""
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


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread, by the cuobjdump that comes with Triton."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    if found is None:
        raise RuntimeError(f"cuobjdump --dump-resource-usage: expected 'REG:n STACK:n', got {report!r}")
    return int(found[1]), int(found[2])


def table(usages: Sequence[Usage]) -> str:
    """A Markdown table."""
    lines = ["| kernel | target | registers | stack bytes | shared bytes |", "|---|---|---|---|---|"]
    lines += [f"| {u.name} | sm_{u.arch} | {u.registers} | {u.stack} | {u.shared} |" for u in usages]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m specstep.kernels.compile_cubin", description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES), help="compute capabilities")
    parser.add_argument("--out", type=Path, help="also write the cubins to this folder")
    options = parser.parse_args(arguments)
    usages = [compile_case(case, arch) for case in cases() for arch in options.arch]
    print(table(usages))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        for usage in usages:
            stem = re.sub(r"[ =]+", "-", usage.name)
            (options.out / f"{stem}-sm_{usage.arch}.cubin").write_bytes(usage.cubin)


if __name__ == "__main__":
    main()
