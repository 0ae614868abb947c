"""Builds and loads the library of our C++ kernels, for the CPU.

Nothing happens at import. A process that only runs engines calls `load_library` with the engine's copy of the library;
it needs neither a compiler nor Inductor.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ..processor import is_intel
from ..user_cache import cache_path
from .native_ops import NATIVE_OPS

LIBRARY_NAME = "libspecstep.so"
FOLDER = Path(__file__).parent
# What is compiled together: of a small file headers take more than the file. What is large is on its own, and so are
# loops whose speed the compiler's limits of inlining would change. The longest are first.
UNITS = (
    ("tree_attention/tree_attention.cpp",),
    ("choose/choose.cpp", "rank/rank.cpp"),
    ("exact/functions.cpp",),
    ("linear/k_blocks.cpp",),
    ("linear/group_blocks.cpp",),
    ("exact/rows.cpp",),
    ("linear/table_blocks.cpp",),
    ("top_log_probs/top_log_probs.cpp", "compact/compact.cpp", "fold/fold.cpp"),
    ("linear/linear.cpp", "linear/embedding.cpp", "linear/experts.cpp"),
    ("linear_attention/linear_attention.cpp", "shift/shift.cpp"),
    ("wkv/wkv.cpp", "all_reduce/all_reduce.cpp", "communicator.cpp", "record.cpp"),
    ("ngram/ngram.cpp", "all_gather/all_gather.cpp", "parallel.cpp"),
    ("linear/float_blocks.cpp",),
)  # fmt: skip
SOURCES = tuple(source for unit in UNITS for source in unit)
HEADERS = (
    "tensor.h", "record.h", "parallel.h", "communicator.h", "noise.h", "row.h", "exact/element.h",
    "exact/exponential.h", "linear/linear.h", "linear/block.h", "linear/quants.h", "linear/scales.h",
    "linear/group_term.h", "linear/group_sum.h", "linear/groups.h", "linear/tile.h", "linear/plan.h",
    "linear/multiply.h", "linear/following.h", "choose/filter.h", "tree_attention/vector.h",
    "tree_attention/element.h", "tree_attention/coming.h", "tree_attention/block.h", "tree_attention/seen.h",
    "tree_attention/call.h", "tree_attention/parts.h", "linear_attention/state.h",
)  # fmt: skip
# The oldest PyTorch whose stable C interface the library uses; it then loads in that version and every later one.
STABLE_INTERFACE = "0x020b000000000000"
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma")
INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {
    "avx512_bf16": (*AVX512, "-mavx512vnni", "-mavx512bf16"),  # no processor has the latter alone
    "avx512_vnni": (*AVX512, "-mavx512vnni"),
    "avx512": AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "portable": (),
}


class CompilerError(RuntimeError):
    """No C++ compiler, or one that failed."""


def supported_instruction_sets() -> list[str]:
    """Those of INSTRUCTION_SETS that this machine runs, the widest first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ["portable"]
    support = {
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "avx512_vnni": torch.cpu._is_vnni_supported(),
        "avx512": torch.cpu._is_avx512_supported(),
        "avx2": torch.cpu._is_avx2_supported(),
        "portable": True,
    }
    return [name for name in INSTRUCTION_SETS if support[name]]


def detect_instruction_set() -> str:
    """The one of INSTRUCTION_SETS that our kernels are fastest with on this machine.

    That is the widest, but for Intel's processors: they multiply pairs of bfloat16 at half the rate of floats
    (bench/LOG.md).
    """
    sets = supported_instruction_sets()
    return sets[1] if sets[0] == "avx512_bf16" and is_intel() else sets[0]


def build_library(instruction_set: str | None = None, compiler: str | None = None, cache: Path | None = None) -> Path:
    """Compiles the library, or finds it in the cache, and returns its path.

    instruction_set: one of INSTRUCTION_SETS; by default the fastest of this machine. compiler: a g++ (11 or later) or
    clang++ command; by default the first of g++, clang++, c++ on the path. cache: by default the user's (see
    `user_cache`).
    Raises ValueError for an unknown instruction set, CompilerError without a compiler or when compilation fails.
    """
    chosen = detect_instruction_set() if instruction_set is None else instruction_set
    if chosen not in INSTRUCTION_SETS:
        raise ValueError(f"instruction_set: expected one of {', '.join(INSTRUCTION_SETS)}, got {chosen!r}")
    command = [find_compiler(compiler), *_arguments(chosen)]
    name = f"native-{_digest(command)}"
    folder = cache_path(name) if cache is None else cache / name
    library = folder / LIBRARY_NAME
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(command, library)
    return library


def load_library(library: Path | None = None) -> None:
    """Loads the operators, their C functions for compiled models included; by default builds them first. Repeats are
    free.

    Only the first library of a process counts: a second copy would define the operators twice. Raises
    FileNotFoundError for a missing file and OSError for one that this machine or this PyTorch cannot load, or that is
    of another version.
    """
    if hasattr(torch.ops.specstep, next(iter(NATIVE_OPS))):
        return
    path = build_library() if library is None else library
    if not path.is_file():
        raise FileNotFoundError(f"library of our C++ kernels: no file at {path}; build the engine again")
    # RTLD_GLOBAL: a compiled model names the C functions without naming the library, whose folder differs per engine.
    ctypes.CDLL(str(path.resolve()), mode=ctypes.RTLD_GLOBAL)
    missing = [name for name in NATIVE_OPS if not hasattr(torch.ops.specstep, name)]
    if missing:
        raise OSError(f"{path}: expected the operators of this version of specstep, got none named {missing[0]}")
    for name, op in NATIVE_OPS.items():
        torch.library.register_fake(f"specstep::{name}", op.fake)


@functools.cache
def library_error() -> str | None:
    """Why the library can be neither loaded nor built, None where it is loaded now."""
    try:
        load_library()
    except CompilerError as error:
        return str(error)
    return None


def has_library() -> bool:
    """Whether the library is loaded, or can be: there is a C++ compiler that builds it."""
    return library_error() is None


def c_shims() -> dict[Any, list[str]]:
    """Inductor's `aot_inductor.custom_ops_to_c_shims`: with it a compiled model calls the C functions directly."""
    load_library()
    return {getattr(torch.ops.specstep, name).default: [op.declaration(name)] for name, op in NATIVE_OPS.items()}


def find_compiler(compiler: str | None = None) -> str:
    candidates = ("g++", "clang++", "c++") if compiler is None else (compiler,)
    for candidate in candidates:
        found = shutil.which(candidate)
        if found is not None:
            return found
    raise CompilerError(f"compiler: expected a C++ compiler, got none of {', '.join(candidates)}; install g++")


def _arguments(instruction_set: str) -> list[str]:
    root = Path(torch.__file__).parent
    flags = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-Wno-psabi"]
    # What nobody looks at keeps loops of comparisons scalar.
    flags += ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", *INSTRUCTION_SETS[instruction_set]]
    return [*flags, f"-DTORCH_TARGET_VERSION={STABLE_INTERFACE}", "-isystem", str(root / "include")]


def _digest(command: list[str]) -> str:
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=False).stdout
    texts = [repr(UNITS), *((FOLDER / name).read_text() for name in (*SOURCES, *HEADERS))]
    return hashlib.sha256("\0".join([*command, version, torch.__version__, *texts]).encode()).hexdigest()[:16]


def _compile(command: list[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        objects = [Path(folder) / f"{number}.o" for number in range(len(UNITS))]
        for unit, target in zip(UNITS, objects, strict=True):
            target.with_suffix(".cpp").write_text("".join(f'#include "{FOLDER / source}"\n' for source in unit))
        jobs = [[*command, "-c", str(target.with_suffix(".cpp")), "-o", str(target)] for target in objects]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, jobs))
        # No search path is stored: libtorch is always loaded by then, and is found by its name. Libraries follow what
        # needs them: some linkers drop them otherwise.
        partial, needed = Path(folder) / LIBRARY_NAME, Path(torch.__file__).parent / "lib"
        _run([command[0], "-shared", *map(str, objects), "-L", str(needed), "-ltorch_cpu", "-o", str(partial)])
        os.replace(partial, library)  # atomic: another process may be building the same


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompilerError(f"compiler: {' '.join(command)} failed\n{done.stderr}")
