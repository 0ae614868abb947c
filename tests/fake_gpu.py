"""A CUDA driver and a TensorRT runtime for machines without a GPU: host memory, ONNX Runtime as the executor."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from specstep.kernels.cuda_driver import Driver

KINDS = {"int64": "INT64", "bool": "BOOL", "float": "FLOAT", "float16": "HALF"}


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


class FakeEngine:
    """An ONNX file behind TensorRT's engine and context. `slots`: of the caches, which a plan has fixed."""

    def __init__(self, path: Path, slots: int, chunk: int):
        self.session = onnxruntime.InferenceSession(str(path))
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self.outputs = {value.name: value for value in self.session.get_outputs()}
        self.slots, self.chunk, self.used = slots, chunk, []
        self.names = [*self.inputs, *self.outputs]
        self.num_io_tensors, self.num_optimization_profiles = len(self.names), 2 if "tokens" in self.inputs else 0

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> str:
        return "input" if name in self.inputs else "output"

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=KINDS[(self.inputs | self.outputs)[name].type[7:-1]])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.slots if size == "slots" else size for size in (self.inputs | self.outputs)[name].shape)

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, int]]:
        short = self.chunk // 2
        return [(1, 2), (1, 4), (1, short)] if profile == 0 else [(1, short), (1, self.chunk), (1, self.chunk)]

    def create_execution_context(self) -> Any:
        return FakeContext(self)


class FakeContext:
    """Runs the file over the addresses that were bound."""

    def __init__(self, engine: FakeEngine):
        self.engine, self.addresses, self.tokens, self.profile = engine, dict[str, int](), 0, 0

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile = index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, int]) -> bool:
        least, _, most = self.engine.get_tensor_profile_shape(name, self.profile)
        assert name == "tokens" and least[1] <= shape[1] <= most[1]
        self.tokens = shape[1]
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return address != 0

    def execute_async_v3(self, stream: int) -> bool:
        engine = self.engine
        engine.used.append((self.profile, self.tokens))
        arrays = {}
        for name, value in (engine.inputs | engine.outputs).items():
            shape = tuple(self.tokens if size == "tokens" else size for size in engine.get_tensor_shape(name))
            dtype = {"float": "float32"}.get(value.type[7:-1], value.type[7:-1])
            arrays[name] = array_at(self.addresses[name], shape, dtype)
        results = engine.session.run(list(engine.outputs), {name: arrays[name].copy() for name in engine.inputs})
        for name, result in zip(engine.outputs, results, strict=True):
            arrays[name][:] = result
        return stream != 0


def fake_library(engines: dict[bytes, FakeEngine], version: str) -> Any:
    """The module that `load_library` gives: plans are known by their bytes, others are refused."""

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
    return SimpleNamespace(Logger=Logger, Runtime=Runtime, TensorIOMode=mode, __version__=version)
