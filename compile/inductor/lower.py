"""Lower an exported graph with AOTInductor."""

import contextlib
import dataclasses
import re
import shutil
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from ...errors import BuildError, needs_extra
from ...kernels.native import LIBRARY_NAME, build_library, c_shims, detect_instruction_set, has_library, library_error
from ...progress import OnProgress
from ...runtime.inductor.aoti import machine
from ..assemble import Assembled
from ..export import Compile, Export, export_program
from ..lowered import Lowered
from ..precision import Precision, plain
from ..stages import count_operators, stage_shares
from ..writer import write_weights
from . import exact
from .compiled import Compiled
from .compilers import check_torch, check_vector_instructions
from .exact_walk import left_over
from .forked import Forked, run_forked
from .kept_code import find_program, keep_program, program_key
from .kept_lowering import find_lowering, keep_lowering, lowering_key
from .layer_code import layers_compiled_once
from .lean_code import FEW_PAIRS, UNCHECKED, known, no_input_checks, rules_made_once
from .of_rank import export_like
from .rewrites import rewrite_for_cpu, rewrite_for_gpu
from .signature import signed
from .stored_program import Packed

CONFIG: dict[str, Any] = {
    # The weights stay out of the package and keep their names: all programs are lent the same mapped file.
    "always_keep_tensor_constants": True,
    "aot_inductor.package_constants_in_so": False,
}
GPU_CONFIG: dict[str, Any] = {
    "shape_padding": False,  # it would copy weights of odd sizes in each step
}
# One launch for small kernels that do not wait for each other; reductions over a size that varies cannot be in one.
FEW_LAUNCHES: dict[str, Any] = {"combo_kernels": True, "combo_kernels_pointwise_only": True}


def lower(graphs: Assembled, directory: Path, progress: OnProgress) -> Lowered:
    """Write NAME.pt2 for each program, the weights file and, on a CPU, the library of our ops. Raises BuildError."""
    if graphs.gpu is None:
        return _lower(graphs, directory, progress, export_program, _compile)
    described = load_described_gpu()

    def lower_without(tell: OnProgress) -> Lowered:
        with described.lowers_without(graphs.gpu, _compile) as (export, compile_one):
            return _lower(graphs, directory, tell, export, compile_one)

    lowered: Lowered = run_forked("engine", lower_without, progress)  # that process can use a real GPU no more
    return lowered


def load_described_gpu() -> ModuleType:
    """Import what lowers for a GPU that is not there. Raises MissingPackageError."""
    with needs_extra("build-cuda", "build"):
        from .described_gpu import lower as described

        described.header_folders()
    return described


def _lower(graphs: Assembled, directory: Path, progress: OnProgress, export: Export, compile_one: Compile) -> Lowered:
    device = graphs.spec.device
    check_torch(device)
    if device == "cpu" and not has_library():
        _check_without_library(graphs.spec.config["weights"])
    key = lowering_key(graphs, cpu_settings()) if device == "cpu" and has_library() else None
    compiled = find_lowering(key, graphs, directory, progress) if key else None
    if compiled is None:
        compiled = _trace_and_compile(graphs, directory, progress, export, compile_one)
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


def _trace_and_compile(
    graphs: Assembled, directory: Path, progress: OnProgress, export: Export, compile_one: Compile
) -> Compiled:
    exported, device = {}, graphs.spec.device
    for name, program in graphs.programs.items():
        progress(f"tracing {name}")
        exported[name] = export(program, graphs.spec)
    progress(f"compiling {' and '.join(f'{name} ({len(e.graph.nodes)} nodes)' for name, e in exported.items())}")
    stages = stage_shares(exported["step"])  # before its weights are packed
    packed, keys = compile_programs(exported, directory, device, graphs.precision, compile_one)
    wanted = {name: constant_names(directory / f"{name}.pt2", device) for name in exported}
    others = []
    for of_rank in graphs.others:
        own, more = export_like(exported, of_rank, graphs, export)
        packed += more
        others.append(_constants(own, wanted))
    inexact, operators = _drafts_may_change(device, exported.values()), count_operators(exported["step"])
    return Compiled(_constants(exported, wanted), packed, stages, inexact, operators, keys, tuple(others))


def _constants(exported: Mapping[str, ExportedProgram], wanted: dict[str, list[str]]) -> dict[str, dict[str, Tensor]]:
    """The tensors that each program is lent."""
    held = {name: {**program.state_dict, **program.constants} for name, program in exported.items()}
    return {name: {key: held[name][key] for key in wanted[name]} for name in exported}


def _check_without_library(weights: str) -> None:
    """Raises BuildError where an engine without our kernels cannot be what the user asked for."""
    if weights in ("int8", "int4"):
        raise BuildError(
            f"weights: expected auto or bfloat16 where our C++ kernels cannot be built, got {weights}: {_no_library()}"
        )


def _no_library() -> str:
    reason, *_ = str(library_error()).splitlines()
    return reason


def _drafts_may_change(device: str, exported: Collection[ExportedProgram]) -> list[str]:
    """Why drafts may change a text of these programs, once they are compiled."""
    if device != "cpu":
        return ["the GPU's libraries add in an order that depends on how much is computed at once"]
    if not has_library():
        return [f"our C++ kernels cannot be built ({_no_library()}); PyTorch's are used, which are slower"]
    return left_over(exported)


@contextlib.contextmanager
def _lean() -> Iterator[None]:
    # Our ops take any strides. By default the compiler copies what does not have those of the traced tensors: each
    # layer's whole cache, which it writes in place although the trace has a new tensor for it.
    layout = torch._functorch.config.patch(custom_op_default_layout_constraint="needs_fixed_stride_order")
    with layout, no_input_checks(), rules_made_once():
        yield


def _compile(program: ExportedProgram, path: Path, config: dict[str, Any]) -> None:
    with _lean():
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=config)


def compile_programs(
    exported: dict[str, ExportedProgram],
    directory: Path,
    device: str,
    precision: Precision = plain,
    compile_one: Compile = _compile,
) -> tuple[list[Packed], dict[str, str]]:
    """Compile each program to `directory/NAME.pt2`: the graph, without weights. Returns the weights that were packed,
    and where the user's cache keeps each program, on a CPU. Raises BuildError. compile_one: what compiles a program for
    a GPU.

    A CPU program is rewritten where the library of our kernels can be built. Each program is compiled in a process of
    its own, at the same time: compiling is one thread of Python, then one of g++. The processes are forked and share
    the weights. What was compiled before comes from the user's cache.
    """
    paths = {name: directory / f"{name}.pt2" for name in exported}
    if device == "cuda":  # CUDA does not survive a fork
        config = CONFIG | known(UNCHECKED) | GPU_CONFIG
        if known(FEW_LAUNCHES) == FEW_LAUNCHES:
            config |= FEW_LAUNCHES
        packed = rewrite_for_gpu(exported.values(), precision)
        for name, program in exported.items():
            compile_one(program, paths[name], signed(config, program))
        return packed, {}
    packed, config = rewrite_for_cpu(exported.values(), precision) if has_library() else [], cpu_settings()
    check_vector_instructions()
    keys = {name: program_key(program, signed(config, program)) for name, program in exported.items()}
    missing = [name for name, key in keys.items() if not find_program(key, paths[name])]
    children = [Forked(name, _compiles(exported[name], paths[name], config)) for name in missing]
    try:
        for child in children:
            child.join()
    finally:
        for child in children:
            child.process.terminate()
    for name in missing:
        keep_program(keys[name], paths[name])
    return packed, keys


def cpu_settings() -> dict[str, Any]:
    """Inductor's, for programs of a CPU."""
    ours = exact.CONFIG | {"aot_inductor.custom_ops_to_c_shims": c_shims()} if has_library() else {}
    return CONFIG | known(UNCHECKED) | ours | known(FEW_PAIRS)


def _compiles(program: ExportedProgram, path: Path, config: dict[str, Any]) -> Callable[[Any], None]:
    def compile_it(progress: OnProgress) -> None:
        settings = signed(config, program)
        with _lean(), layers_compiled_once(program, settings) as with_layers:
            _compile(program, path, with_layers)

    return compile_it


def constant_names(path: Path, device: str) -> list[str]:
    """Names of the weights that a compiled graph must be lent."""
    if device == "cpu":
        return list(torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1).get_constant_fqns())
    with zipfile.ZipFile(path) as package:  # a machine without the GPU cannot load it
        code, *_ = (package.read(name).decode() for name in package.namelist() if name.endswith(".wrapper.cpp"))
    return re.findall(r'constants_info_\[\d+\]\.original_fqn = "(.*)";', code)


def requires(device: str) -> dict[str, Any]:
    """What a machine needs to run what is compiled on this one."""
    here = machine()
    needs = {"torch": here["torch"], "architecture": here["architecture"]}
    if device == "cuda":
        return needs | {"cuda_capability": here["cuda_capability"], "cuda": here["cuda"]}
    isa = [*str(torch._inductor.cpu_vec_isa.pick_vec_isa()).split(), detect_instruction_set()]
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
