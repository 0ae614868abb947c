"""Every backend, an entry each: who lowers an engine to it, who runs it, and what it takes."""

from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from .errors import needs_extra


class Backend(NamedTuple):
    """One backend."""

    compiler: str  # module with `lower(graphs, directory, progress) -> Lowered`
    runner: str  # module with `machine()` and `open_session(directory, manifest, gpu, progress) -> Session`
    dtypes: tuple[str, ...]  # that it takes, its default first
    devices: tuple[str, ...]  # that it takes, its default first
    options: tuple[str, ...]  # the build options that not every backend has
    build_extra: str  # the extra that building takes
    run_extra: str  # the extra that running takes
    any_nodes: bool = True  # whether a step may verify fewer nodes than a tree has, and a program draft nothing

    def load_compiler(self) -> ModuleType:
        """Import `compiler`. Raises MissingPackageError."""
        with needs_extra(self.build_extra, "build"):
            return import_module(self.compiler, __package__)

    def load_runner(self) -> ModuleType:
        """Import `runner`. Raises MissingPackageError."""
        with needs_extra(self.run_extra, "engine"):
            return import_module(self.runner, __package__)


FLOATS = ("bfloat16", "float32", "float16")
ONNX_FLOATS = ("float32", "float16")  # ONNX Runtime has no bfloat16 matrix product on a CPU
TENSORRT = (".compile.tensorrt.lower", ".runtime.tensorrt.session", FLOATS, ("cpu",))  # traced on a CPU, run on a GPU

OF_INDUCTOR = ("weights", "kv_cache", "compute_capability", "sum_parts", "ranks", "draft_ranks")

BACKENDS: dict[str, Backend] = {
    "inductor": Backend(
        ".compile.inductor.lower", ".runtime.inductor.aoti", FLOATS, ("cpu", "cuda"), OF_INDUCTOR, "build", ""
    ),
    "onnx": Backend(".compile.onnx.lower", ".runtime.onnx", ONNX_FLOATS, ("cpu",), (), "build-onnx", "onnx"),
    "tensorrt": Backend(*TENSORRT, ("plugins",), "build-tensorrt", "tensorrt", any_nodes=False),
    "tensorrt-rtx": Backend(
        *TENSORRT, ("plugins", "compute_capability"), "build-tensorrt-rtx", "tensorrt-rtx", any_nodes=False
    ),
}
