"""Lower an exported graph with AOTInductor."""

import multiprocessing
import shutil
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from ..kernels.linear import LIBRARY_NAME, build_library, c_shims
from ..runtime.errors import BuildError
from .passes import use_small_linear

CONFIG: dict[str, Any] = {
    # The weights stay out of the package and keep their names: both programs are lent the same mapped file.
    "always_keep_tensor_constants": True,
    "aot_inductor.package_constants_in_so": False,
    # The thread count is the machine's that runs the engine, not the builder's.
    "cpp.dynamic_threads": True,
}


def compile_programs(exported: dict[str, ExportedProgram], directory: Path, device: str) -> None:
    """Compile each program to `directory/NAME.pt2`: the graph, without weights. Raises BuildError.

    On a CPU the linear layers become ours (`kernels.linear`), and each program is compiled in a process of its own, at
    the same time: compiling is one thread of Python, then one of g++. The processes are forked and share the weights.
    """
    config, paths = dict(CONFIG), {name: directory / f"{name}.pt2" for name in exported}
    if device == "cuda":  # CUDA does not survive a fork
        for name, program in exported.items():
            _compile(program, paths[name], config)
        return
    if sum(use_small_linear(program) for program in exported.values()):
        config["aot_inductor.custom_ops_to_c_shims"] = c_shims()
    children = [_Child(name, program, paths[name], config) for name, program in exported.items()]
    try:
        for child in children:
            child.join()
    finally:
        for child in children:
            child.process.terminate()


def _compile(program: ExportedProgram, path: Path, config: dict[str, Any]) -> None:
    torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=config)


class _Child:
    """A forked process that compiles one program."""

    def __init__(self, name: str, program: ExportedProgram, path: Path, config: dict[str, Any]):
        fork = multiprocessing.get_context("fork")
        self.name = name
        self.result, sender = fork.Pipe(duplex=False)
        self.process = fork.Process(target=self._run, args=(program, path, config, sender), daemon=True)
        self.process.start()
        sender.close()

    @staticmethod
    def _run(program: ExportedProgram, path: Path, config: dict[str, Any], result: Connection) -> None:
        torch.set_num_threads(1)  # the parent's OpenMP threads are not here
        warnings.simplefilter("ignore")  # the compiler's about itself
        try:
            _compile(program, path, config)
            result.send(None)
        except BaseException as error:  # sent to the parent, whatever it is
            lines = [line for line in str(error).splitlines() if line.strip()] or [""]
            full = "No space left" in str(error)
            result.send("no space left on the device" if full else f"{type(error).__name__}: {lines[0]}")

    def join(self) -> None:
        """Wait. Raises BuildError with what the child said if it failed."""
        try:
            failure = self.result.recv()
        except EOFError:
            failure = "the compiling process died; is there enough memory?"
        self.process.join()
        if failure:
            raise BuildError(f"compile: {self.name}: {failure}")


def copy_libraries(directory: Path) -> None:
    """Put the library of our CPU ops beside the programs that call it."""
    shutil.copy(build_library(), directory / LIBRARY_NAME)


def constant_names(path: Path, device: str) -> list[str]:
    """Names of the weights that a compiled graph must be lent."""
    index = torch.cuda.current_device() if device == "cuda" else -1
    return list(torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, index).get_constant_fqns())
