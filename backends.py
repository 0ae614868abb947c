"""Every backend, an entry each: who lowers an engine to it, who runs it, and what it takes."""

from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from .errors import needs_extra


class Backend(NamedTuple):
    """One backend.

    compiler: module with `lower(graphs, directory, report) -> Lowered`. runner: module with `machine()` and
    `open_session(directory, manifest, gpu, report) -> Session`. dtypes, devices: what it takes, its defaults first.
    options: the build options that not every backend has. build_extra, run_extra: the extras that building and
    running take.
    """

    compiler: str
    runner: str
    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    options: tuple[str, ...]
    build_extra: str
    run_extra: str

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

OF_INDUCTOR = ("weights", "compute_capability")

BACKENDS: dict[str, Backend] = {
    "inductor": Backend(
        ".compile.inductor.lower", ".runtime.inductor.aoti", FLOATS, ("cpu", "cuda"), OF_INDUCTOR, "build", ""
    ),
    "onnx": Backend(".compile.onnx.lower", ".runtime.onnx", ONNX_FLOATS, ("cpu",), (), "build-onnx", "onnx"),
    "tensorrt": Backend(*TENSORRT, ("plugins",), "build-tensorrt", "tensorrt"),
    "tensorrt-rtx": Backend(*TENSORRT, ("plugins", "compute_capability"), "build-tensorrt-rtx", "tensorrt-rtx"),
}
