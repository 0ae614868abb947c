"""Run engines in TensorRT and TensorRT for RTX: the session over device memory, without torch.

Caches are bound whole, and where the engine has plugins, their inputs and outputs are the same memory: the plugins
write in place. What a step returns anew is copied back to where the next step reads it, on the device.
"""

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels.cuda_driver import Driver, DriverError, driver
from .engine_file import NEXT, REBUILD, EngineSpec, Manifest, ProgramSpec, TensorSpec
from .errors import EngineError
from .session import Session
from .tensorrt_library import MODULES, LibraryError, load_library

BITS = {"bfloat16": "uint16"}  # numpy has no bfloat16: its bits
PLAN_DTYPES = {"INT64": "int64", "BOOL": "bool", "FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16"}


def machine() -> dict[str, Any]:
    """What an engine's `requires` is compared with: the libraries that are installed, with their versions."""
    libraries = []
    for backend in MODULES:
        try:
            libraries.append(f"{backend} {load_library(backend).__version__}")
        except LibraryError:
            continue
    return {"libraries": libraries}


def open_session(directory: Path, manifest: Manifest) -> Session:
    """Load both plans. Raises EngineError where there is no GPU, or one that the plans were not built for."""
    spec, built_for = manifest.spec, manifest.about["compute_capability"]
    try:
        device = driver()
        capability = "{}.{}".format(*divmod(device.capability(), 10))
    except DriverError as error:
        raise EngineError(
            f"engine: expected an NVIDIA GPU of compute capability {', '.join(built_for)}, got none ({error})"
        ) from None
    if capability not in built_for:
        raise EngineError(
            f"engine: compute_capability: expected one of {', '.join(built_for)}, this GPU has {capability}; {REBUILD} "
            f"for it"
        )
    trt = load_library(spec.config["backend"])
    runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
    with _plugins(spec):
        prefill, step = (Plan(trt, runtime, directory / p.file, spec, p) for p in (spec.prefill, spec.step))
    return TensorrtSession(spec, prefill, step, device)


def _plugins(spec: EngineSpec) -> contextlib.AbstractContextManager[None]:
    """Our plugins, where plans need them from outside: those of TensorRT are inside its plans."""
    if spec.config["backend"] == "tensorrt" or not spec.config["plugins"]:
        return contextlib.nullcontext()
    from ..kernels.plugin_rtx import registered

    return registered()


class DeviceArray:
    """A tensor in device memory: rows of it can be assigned from the host, and all of it read."""

    def __init__(self, device: Driver, stream: int, shape: Sequence[int], dtype: str):
        self.device, self.stream, self.shape = device, stream, tuple(shape)
        self.dtype = np.dtype(BITS.get(dtype, dtype))
        self.row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        self.address = device.allocate(self.shape[0] * self.row_bytes)

    def row(self, row: int) -> int:
        """Address of a row."""
        return self.address + row * self.row_bytes

    def __setitem__(self, key: Any, value: Any) -> None:
        """`array[row] = value` and `array[row, :count] = value`."""
        row, part = key if isinstance(key, tuple) else (key, slice(None))
        shape = self.shape[1:] if part == slice(None) else (part.stop, *self.shape[2:])
        data = np.ascontiguousarray(np.broadcast_to(np.asarray(value, self.dtype), shape))
        self.device.upload(self.row(row), data, self.stream)

    def numpy(self) -> NDArray[Any]:
        """A copy on the host, when the device is done with the work so far."""
        data = np.empty(self.shape, self.dtype)
        self.device.download(data, self.address, self.stream)
        return data

    def tolist(self) -> Any:
        """Nested lists, as of a numpy array."""
        return self.numpy().tolist()


class Plan:
    """A deserialized plan and its execution context. Raises EngineError for what is not the manifest's program."""

    def __init__(self, trt: Any, runtime: Any, path: Path, spec: EngineSpec, program: ProgramSpec):
        self.path, self.program = path, program
        self.engine = runtime.deserialize_cuda_engine(path.read_bytes())
        if self.engine is None:
            raise EngineError(
                f"{path}: expected a plan that {spec.config['backend']} {trt.__version__} loads, got one that it "
                f"refuses; {REBUILD} here"
            )
        self._check(trt, spec)
        self.context = self.engine.create_execution_context()
        self.profile = 0

    def _check(self, trt: Any, spec: EngineSpec) -> None:
        names = [self.engine.get_tensor_name(index) for index in range(self.engine.num_io_tensors)]
        inputs = [name for name in names if self.engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        odd = (set(inputs) - set(self.program.inputs)) | ((set(names) - set(inputs)) ^ set(self.program.outputs))
        if odd:  # an input that nothing reads may be missing
            raise EngineError(
                f"{self.path}: expected the inputs and outputs of the manifest, got a difference in {sorted(odd)[:3]}; "
                f"{REBUILD}"
            )
        self.inputs = inputs
        for tensor in (*spec.state, *spec.caches):
            if tensor.name in inputs:
                dtype = PLAN_DTYPES.get(self.engine.get_tensor_dtype(tensor.name).name)
                if dtype != tensor.dtype:
                    raise EngineError(f"{self.path}: {tensor.name}: expected {tensor.dtype}, got {dtype}; {REBUILD}")

    def run(self, addresses: dict[str, int], tokens: int, stream: int) -> None:
        """Run over bound memory: inputs and outputs by name. tokens: of a prefill call, 0 in a step."""
        if tokens and "tokens" in self.inputs:
            self._use_profile(tokens, stream)
            self.context.set_input_shape("tokens", (1, tokens))
        for name, address in addresses.items():
            if not self.context.set_tensor_address(name, address):
                raise EngineError(f"{self.path}: {name}: expected to be bound, was refused; {REBUILD}")
        if not self.context.execute_async_v3(stream):
            raise EngineError(f"{self.path}: expected to run, TensorRT refused; its log says why")

    def _use_profile(self, tokens: int, stream: int) -> None:
        """The first profile that has this many tokens."""
        for index in range(self.engine.num_optimization_profiles):
            least, _, most = (shape[1] for shape in self.engine.get_tensor_profile_shape("tokens", index))
            if least <= tokens <= most:
                if index != self.profile:
                    self.context.set_optimization_profile_async(index, stream)
                    self.profile = index
                return


class TensorrtSession(Session):
    """See `Session`."""

    def __init__(self, spec: EngineSpec, prefill: Plan, step: Plan, device: Driver):
        super().__init__(spec)
        self._prefill, self._step, self.device, self.stream = prefill, step, device, device.stream()
        self.state: dict[str, DeviceArray] = {t.name: self._new(t.shape, t.dtype) for t in spec.state}
        self.caches = {tensor.name: self._new(self._cache_shape(tensor), tensor.dtype) for tensor in spec.caches}
        for tensor in spec.state:
            if tensor.fill:
                for row in range(spec.max_batch):
                    self.state[tensor.name][row] = tensor.fill
        self._every = self.state | self.caches
        in_place = set(self.caches) if spec.config["plugins"] else set[str]()
        self._after = {
            name: array if name in in_place else self._new(array.shape, str(array.dtype))
            for name, array in self._every.items()
        }
        self._report = self._new(tuple(step.engine.get_tensor_shape("report")), "int64")
        self._tokens = self._new((1, spec.prefill_chunk), "int64")
        self._count = self._new((1,), "int64")

    def array(self, values: Sequence[int]) -> NDArray[np.int64]:
        return np.array(values, np.int64)

    def prefill(self, row: int, tokens: Sequence[int], count: int, slots: int) -> None:
        self._tokens[0, : len(tokens)] = self.array(tokens)
        self._count[0] = count
        addresses = {name: array.row(row) for name, array in self._every.items()}
        addresses |= {"tokens": self._tokens.address, "count": self._count.address}
        after = {name: array.row(row) for name, array in self._after.items()}
        self._run(self._prefill, addresses, after, rows=1, tokens=len(tokens))

    def replay(self, slots: int) -> list[list[int]]:
        addresses = {name: array.address for name, array in self._every.items()}
        after = {name: array.address for name, array in self._after.items()}
        after["report"] = self._report.address
        self._run(self._step, addresses, after, rows=self.spec.max_batch, tokens=0)
        return self._report.tolist()  # the one device-to-host copy

    def _run(self, plan: Plan, before: dict[str, int], after: dict[str, int], rows: int, tokens: int) -> None:
        """Run a plan on what it reads and what it writes, and put what it wrote elsewhere where it is read."""
        written = {name: after[name.removeprefix(NEXT)] for name in plan.program.outputs}
        plan.run({name: before[name] for name in plan.inputs} | written, tokens, self.stream)
        for name in (name.removeprefix(NEXT) for name in plan.program.outputs):
            if name in before and before[name] != after[name]:
                self.device.copy(before[name], after[name], rows * self._every[name].row_bytes, self.stream)

    def _cache_shape(self, tensor: TensorSpec) -> tuple[int, ...]:
        return (*tensor.shape[:2], self.spec.most_slots, *tensor.shape[3:])

    def _new(self, shape: Sequence[int], dtype: str) -> DeviceArray:
        return DeviceArray(self.device, self.stream, shape, dtype)
