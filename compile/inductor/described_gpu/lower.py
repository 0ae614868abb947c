"""Lowers programs for a described GPU to packages that a machine with the GPU loads: their kernels as machine code,
which was not tried out, their C++ linked against names of CUDA's libraries."""

import contextlib
import operator
import subprocess
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from torch._inductor import graph
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.export import ExportedProgram
from torch.utils import cpp_extension
from triton.compiler import CompiledKernel
from triton.runtime.errors import OutOfResources

from ....kernels.native import find_compiler
from ...export import Compile, Export
from ...gpus import GPU
from ..settings import known
from .torch_without_gpu import described_gpu
from .weightless import export_without_memory, weights_away

CONFIG: dict[str, Any] = {
    "compile_threads": 1,  # other processes do not know of the GPU
    "use_static_cuda_launcher": False,
    "triton.autotune_pointwise": False,  # choices of blocks are not compared, so there is one of each
    "aot_inductor.precompile_headers": False,  # their folder is another one each time
    "joint_graph_constant_folding": False,  # it would compute on the GPU
    "cpp.march": "",  # the engine may run on another processor
    "cpp.simdlen": 1,
}
# The libraries that a package needs besides torch's on a CPU, each with a function that every package calls: a linker
# may leave out a library of which nothing is called.
LIBRARIES = {"torch_cuda": "aoti_torch_create_cuda_stream_guard", "cuda": "cuLaunchKernel"}


@contextlib.contextmanager
def lowers_without(gpu: GPU, compile_one: Compile) -> Iterator[tuple[Export, Compile]]:
    """In the block, what exports and what compiles programs for a described GPU, with `compile_one` of a GPU at hand.
    The process can use a real GPU no more. Raises CompilerError."""

    def compile_described(exported: ExportedProgram, path: Path, config: dict[str, Any]) -> None:
        with weights_away(exported):
            compile_one(exported, path, config | known(CONFIG))

    with described_gpu(gpu), _kernels_not_loaded(gpu):
        yield export_without_memory, compile_described


@contextlib.contextmanager
def _kernels_not_loaded(gpu: GPU) -> Iterator[None]:
    """In the block, AOTInductor compiles kernels without loading them, and links without CUDA."""

    def check_fit(kernel: CompiledKernel) -> None:
        if kernel.metadata.shared > gpu.shared:
            raise OutOfResources(kernel.metadata.shared, gpu.shared, "shared memory")

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        _write_cuda_home(Path(folder))
        for replaced in (
            patch.object(cpp_extension, "CUDA_HOME", folder),
            patch.object(CompiledKernel, "_init_handles", check_fit),  # in place of loading it
            patch.object(PythonWrapperCodegen, "generate_and_run_autotune_block", _keep_kernels),
            patch.object(graph, "is_same_tensor", operator.is_),  # by their addresses they would all be the same
        ):
            stack.enter_context(replaced)
        yield


def _keep_kernels(wrapper: PythonWrapperCodegen) -> None:
    """Compile a program's kernels and keep them where the generator of C++ looks for them. A kernel with several
    choices of blocks gets the first; on a GPU, they would be timed."""
    defined: dict[str, Any] = {}
    exec(f"{wrapper.kernel_autotune_defs.getvalue()}\nasync_compile.wait(globals())", defined)
    for kernel in defined.values():
        if isinstance(kernel, CachingAutotuner):
            kernel.save_gpu_kernel("stream", kernel.launchers[0])


def header_folders() -> list[Path]:
    """Where CUDA's headers lie: Triton brings most of them, NVIDIA's C++ library the rest. Raises
    ModuleNotFoundError."""
    files = metadata.files("nvidia-cuda-cccl") or []
    target = next(Path(str(file.locate())) for file in files if file.match("include/nv/target"))
    return [Path(triton.__file__).parent / "backends/nvidia/include", target.parent.parent]


def _write_cuda_home(folder: Path) -> None:
    """CUDA's headers, and libraries to link against that have no code."""
    (folder / "include").mkdir()
    for headers in header_folders():
        for path in headers.iterdir():
            if not (folder / "include" / path.name).exists():
                (folder / "include" / path.name).symlink_to(path)
    (folder / "lib64").mkdir()
    for name, function in LIBRARIES.items():
        library = folder / "lib64" / f"lib{name}.so"
        named = f"-Wl,-soname,lib{name}.so{'.1' if name == 'cuda' else ''}"
        command = [find_compiler(), "-shared", "-fPIC", named, "-x", "c++", "-", "-o", str(library)]
        subprocess.run(command, input=f'extern "C" void {function}() {{}}', text=True, check=True)
