"""A CUDA driver and a TensorRT runtime for machines without a GPU: host memory, ONNX Runtime as the executor."""

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from specstep.runtime.tensorrt.driver import Driver

KINDS = {"int64": "INT64", "int32": "INT32", "bool": "BOOL", "float": "FLOAT", "float16": "HALF"}


def fake_driver(folder: Path) -> Driver:
    """A `Driver` over fake_gpu.c. Skips the test where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = folder / "libfakecuda.so"
    source = Path(__file__).parent / "fake_gpu.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", str(source), "-o", str(library)], check=True)
    return Driver(str(library))


def array_at(address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A view of memory."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype).reshape(shape)


@functools.cache
def onnx_session(path: Path) -> onnxruntime.InferenceSession:
    """ONNX Runtime over a file that does not change: it holds no state, and takes seconds to open."""
    return onnxruntime.InferenceSession(str(path))


class FakeEngine:
    """An ONNX file behind TensorRT's engine. `fixed`: sizes that a plan has fixed, by name; `profiles`: sizes of its
    one dynamic dimension."""

    def __init__(self, path: Path, fixed: dict[str, int], profiles: list[tuple[int, int, int]], device: Driver):
        self.session = onnx_session(path)
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self.outputs = {value.name: value for value in self.session.get_outputs()}
        self.fixed, self.profiles, self.device = fixed, profiles, device
        self.used: list[tuple[int, int]] = []  # profile and size of each run
        self.can_be_captured = True
        self.contexts: list[FakeContext] = []
        self.names = [*self.inputs, *self.outputs]
        self.num_io_tensors, self.num_optimization_profiles = len(self.names), len(profiles)

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> str:
        return "input" if name in self.inputs else "output"

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=KINDS[(self.inputs | self.outputs)[name].type[7:-1]])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shape(name, -1)

    def shape(self, name: str, size: int) -> tuple[int, ...]:
        named = self.fixed | {"rows": size, "tokens": size}
        return tuple(named.get(size, size) for size in (self.inputs | self.outputs)[name].shape)

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        return [self.shape(name, size) for size in self.profiles[profile]]

    def create_execution_context(self, config: Any = None) -> Any:
        self.contexts.append(FakeContext(self, config))
        return self.contexts[-1]

    def create_runtime_config(self) -> Any:
        return FakeConfig()


class FakeConfig:
    """An IRuntimeConfig of TensorRT for RTX."""

    def create_runtime_cache(self) -> Any:
        return FakeCache()

    def set_runtime_cache(self, cache: Any) -> None:
        self.cache = cache


class FakeCache:
    """Kernels that were compiled: one for each size that a context ran."""

    def __init__(self) -> None:
        self.kernels: set[int] = set()

    def deserialize(self, data: bytes) -> bool:
        if not data.startswith(b"kernels "):
            return False
        self.kernels = {int(name) for name in data.split()[1:]}
        return True

    def serialize(self) -> bytes:
        return b" ".join([b"kernels", *(b"%d" % kernel for kernel in sorted(self.kernels))])


class FakeContext:
    """Runs the file over the addresses that were bound, in the order of the device's work."""

    def __init__(self, engine: FakeEngine, config: Any):
        self.engine, self.config, self.addresses, self.profile = engine, config, dict[str, int](), 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.run = ctypes.CFUNCTYPE(None)(self._run)

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile, self.shapes = index, {}
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self.engine.get_tensor_profile_shape(name, self.profile)
        assert all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True))
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return address != 0

    def execute_async_v3(self, stream: int) -> bool:
        library = self.engine.device._library
        if ctypes.c_void_p.in_dll(library, "capturing") and not self.engine.can_be_captured:
            return False
        library.submit_task(self.run)
        return stream != 0

    def _run(self) -> None:
        engine, arrays = self.engine, {}
        sizes = {shape[engine.get_tensor_shape(name).index(-1)] for name, shape in self.shapes.items()}
        assert len(sizes) == (1 if engine.profiles else 0)
        size = min(sizes, default=-1)
        engine.used.append((self.profile, size))
        if self.config is not None:
            self.config.cache.kernels.add(size)
        for name, value in (engine.inputs | engine.outputs).items():
            dtype = {"float": "float32"}.get(value.type[7:-1], value.type[7:-1])
            arrays[name] = array_at(self.addresses[name], engine.shape(name, size), dtype)
        results = engine.session.run(list(engine.outputs), {name: arrays[name].copy() for name in engine.inputs})
        for name, result in zip(engine.outputs, results, strict=True):
            arrays[name][:] = result


def fake_library(engines: dict[bytes, FakeEngine], version: str, **more: Any) -> Any:
    """The module that `load_library` gives: plans are known by their bytes, others are refused. `more`: of the
    module."""

    class Logger:
        ERROR = 1

        def __init__(self, severity: int):
            self.severity = severity

    class Runtime:
        def __init__(self, logger: Logger):
            self.logger = logger

        def deserialize_cuda_engine(self, data: bytes) -> FakeEngine | None:
            return engines.get(data)

    mode = SimpleNamespace(INPUT="input", OUTPUT="output")
    return SimpleNamespace(Logger=Logger, Runtime=Runtime, TensorIOMode=mode, __version__=version, **more)
