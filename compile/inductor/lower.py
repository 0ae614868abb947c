"""Lower an exported graph with AOTInductor."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import needs_extra
from ...kernels.native import LIBRARY_NAME, build_library, detect_instruction_set, has_library
from ...progress import OnProgress
from ...runtime.inductor.aoti import machine
from ..assemble import Assembled
from ..lowered import Lowered
from ..writer import write_weights
from .compiled import Compiled
from .compilers import check_library, check_torch, vector_instructions
from .forked import run_forked
from .kept_lowering import find_lowering, keep_lowering, lowering_key
from .settings import cpu_settings


def lower(graphs: Assembled, directory: Path, progress: OnProgress) -> Lowered:
    """Write NAME.pt2 for each program, the weights file and, on a CPU, the library of our ops. Raises BuildError."""
    if graphs.gpu is None:
        return _lower(graphs, directory, progress, lambda: _programs().trace_and_compile(graphs, directory, progress))
    described, programs = load_described_gpu(), _programs()

    def lower_without(tell: OnProgress) -> Lowered:
        with described.lowers_without(graphs.gpu, programs.compile_package) as ways:
            return _lower(graphs, directory, tell, lambda: programs.trace_and_compile(graphs, directory, tell, *ways))

    lowered: Lowered = run_forked("engine", lower_without, progress)  # that process can use a real GPU no more
    return lowered


def load_described_gpu() -> ModuleType:
    """Import what lowers for a GPU that is not there. Raises MissingPackageError."""
    with needs_extra("build-cuda", "build"):
        from .described_gpu import lower as described

        described.header_folders()
    return described


def _programs() -> ModuleType:
    """Import what traces and compiles: 1.4 seconds, which a lowering that is kept does not take."""
    from . import programs

    return programs


def _lower(graphs: Assembled, directory: Path, progress: OnProgress, compile_all: Callable[[], Compiled]) -> Lowered:
    device = graphs.spec.device
    check_torch(device)
    if device == "cpu":
        check_library(graphs.spec.config["weights"])
    key = lowering_key(graphs, cpu_settings()) if device == "cpu" and has_library() else None
    compiled = find_lowering(key, graphs, directory, progress) if key else None
    if compiled is None:
        compiled = compile_all()
        if key and compiled.keys:
            keep_lowering(key, graphs, compiled)
    if compiled.inexact and device == "cpu":
        progress(f"warning: drafts may change a text: {'; '.join(compiled.inexact)}")
    progress("writing weights")
    if device == "cpu" and has_library():
        shutil.copyfile(build_library(), directory / LIBRARY_NAME)  # with the mode of a new file
    first, *others = graphs.spec.weights_files
    names = write_weights(directory, compiled.constants, first)
    for file, constants in zip(others, compiled.others, strict=True):
        if write_weights(directory, constants, file) != names:
            raise AssertionError(f"{file}: expected the names of {first}")
    programs = {
        name: dataclasses.replace(graphs.spec.programs[name], file=f"{name}.pt2", constants=constants)
        for name, constants in names.items()
    }
    return Lowered(programs, compiled.stages, requires(device), {}, compiled.inexact, compiled.details())


def requires(device: str) -> dict[str, Any]:
    """What a machine needs to run what is compiled on this one."""
    here = machine()
    needs = {"torch": here["torch"], "architecture": here["architecture"]}
    if device == "cuda":
        return needs | {"cuda_capability": here["cuda_capability"], "cuda": here["cuda"]}
    isa = [*vector_instructions().split(), detect_instruction_set()]
    return needs | {"instructions": [flag for flag in here["instructions"] if flag in instruction_flags(isa)]}


def instruction_flags(isa: list[str]) -> set[str]:
    """The operating system's names of the instructions that a vector ISA, as Inductor and we name them, stands for."""
    wide = {"avx512f", "avx512dq", "avx512vl", "avx512bw", "avx2", "fma"}
    flags = {
        "avx2": {"avx2", "fma", "f16c"},
        "avx512": wide,
        "avx512_vnni": wide | {"avx512_vnni"},
        "avx512_bf16": wide | {"avx512_vnni", "avx512_bf16"},
    }
    flags |= {"amx_tile": {"amx_tile", "amx_int8", "amx_bf16"}, "asimd": {"asimd"}}
    return set().union(*(flags.get(name, set()) for name in isa))
