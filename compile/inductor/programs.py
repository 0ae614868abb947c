"""Traces an engine's programs, and compiles them."""

import contextlib
import re
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from ...kernels.native import has_library
from ...progress import OnProgress
from ..assemble import Assembled
from ..export import Compile, Export, export_program
from ..precision import Precision, plain
from ..stages import count_operators, stage_shares
from .compiled import Compiled
from .compilers import why_no_library
from .exact_walk import left_over
from .forked import run_at_once
from .kept_code import find_program, keep_program, program_key
from .layer_code import layers_compiled_once
from .lean_code import GENERATED_LESS
from .lean_trace import TRACED_LESS
from .of_rank import export_like
from .rewrites import rewrite_for_cpu, rewrite_for_gpu
from .settings import cpu_settings, gpu_settings
from .signature import signed
from .stored_program import Packed


def compile_package(program: ExportedProgram, path: Path, config: dict[str, Any]) -> None:
    """Compile a program with Inductor's settings to `path`: the graph, without weights."""
    with _lean():
        _package(program, path, config)


def _package(program: ExportedProgram, path: Path, config: dict[str, Any]) -> None:
    torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=config)


def trace_and_compile(
    graphs: Assembled,
    directory: Path,
    progress: OnProgress,
    export: Export = export_program,
    compile_one: Compile = compile_package,
) -> Compiled:
    """Write NAME.pt2 for each program. Raises BuildError. export, compile_one: others for a GPU that is not there."""
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


@contextlib.contextmanager
def _lean() -> Iterator[None]:
    # Our ops take any strides. By default the compiler copies what does not have those of the traced tensors: each
    # layer's whole cache, which it writes in place although the trace has a new tensor for it.
    layout = torch._functorch.config.patch(custom_op_default_layout_constraint="needs_fixed_stride_order")
    with contextlib.ExitStack() as held:
        held.enter_context(layout)
        for less in (*GENERATED_LESS, *TRACED_LESS):
            held.enter_context(less())
        yield


def compile_programs(
    exported: dict[str, ExportedProgram],
    directory: Path,
    device: str,
    precision: Precision = plain,
    compile_one: Compile = compile_package,
) -> tuple[list[Packed], dict[str, str]]:
    """Compile each program to `directory/NAME.pt2`: the graph, without weights. Returns the weights that were packed,
    and where the user's cache keeps each program, on a CPU. Raises BuildError. compile_one: what compiles a program for
    a GPU.

    A CPU program is rewritten where the library of our kernels can be built. Each program is compiled in a process of
    its own, one for each core at a time: compiling is one thread of Python, then one of g++. The processes are forked
    and share the weights. What was compiled before comes from the user's cache.
    """
    paths = {name: directory / f"{name}.pt2" for name in exported}
    if device == "cuda":  # CUDA does not survive a fork
        config = gpu_settings()
        packed = rewrite_for_gpu(exported.values(), precision)
        for name, program in exported.items():
            compile_one(program, paths[name], signed(config, program))
        return packed, {}
    packed, config = rewrite_for_cpu(exported.values(), precision) if has_library() else [], cpu_settings()
    keys = {name: program_key(program, signed(config, program)) for name, program in exported.items()}
    missing = [name for name, key in keys.items() if not find_program(key, paths[name])]
    missing.sort(key=lambda name: len(exported[name].graph.nodes), reverse=True)  # what takes longest begins
    run_at_once({name: _compiles(exported[name], paths[name], config) for name in missing})
    for name in missing:
        keep_program(keys[name], paths[name])
    return packed, keys


def _compiles(program: ExportedProgram, path: Path, config: dict[str, Any]) -> Callable[[Any], None]:
    def compile_it(progress: OnProgress) -> None:
        settings = signed(config, program)
        with _lean(), layers_compiled_once(program, settings) as with_layers:
            _package(program, path, with_layers)

    return compile_it


def constant_names(path: Path, device: str) -> list[str]:
    """Names of the weights that a compiled graph must be lent."""
    if device == "cpu":
        return list(torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1).get_constant_fqns())
    with zipfile.ZipFile(path) as package:  # a machine without the GPU cannot load it
        code, *_ = (package.read(name).decode() for name in package.namelist() if name.endswith(".wrapper.cpp"))
    return re.findall(r'constants_info_\[\d+\]\.original_fqn = "(.*)";', code)


def _drafts_may_change(device: str, exported: Collection[ExportedProgram]) -> list[str]:
    """Why drafts may change a text of these programs, once they are compiled."""
    if device != "cpu":
        return ["the GPU's libraries add in an order that depends on how much is computed at once"]
    if not has_library():
        return [f"our C++ kernels cannot be built ({why_no_library()}); PyTorch's are used, which are slower"]
    return left_over(exported)
