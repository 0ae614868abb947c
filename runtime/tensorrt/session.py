"""Run engines in TensorRT and TensorRT for RTX: the session over device memory, without torch.

Caches are bound whole, and where the engine has plugins, their inputs and outputs are the same memory: the plugins
write in place. What a step returns anew is copied back to where the next step reads it, on the device.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import EngineError
from ...progress import OnProgress
from ..buffers import Tensors
from ..cuda_graphs import CudaGraphs
from ..engine_file import NEXT, REBUILD, EngineSpec, Manifest, TensorSpec
from ..gpu import refuse_gpu
from ..session import Session
from .device_array import DeviceArray
from .driver import Driver, DriverError, driver
from .library import MODULES, LibraryError, load_library
from .plan import Plan
from .rtx import execution


def machine() -> dict[str, Any]:
    """What an engine's `requires` is compared with: the libraries that are installed, with their versions."""
    libraries = []
    for backend in MODULES:
        try:
            libraries.append(f"{backend} {load_library(backend).__version__}")
        except LibraryError:
            continue
    return {"libraries": libraries}


def open_session(directory: Path, manifest: Manifest, gpu: int | None, progress: OnProgress) -> Session:
    """Load both plans. Raises EngineError where there is no GPU, or one that the plans were not built for."""
    refuse_gpu(gpu)
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
        prefill, step = (Plan(trt, runtime, directory, manifest, p) for p in (spec.prefill, spec.step))
    try:
        return TensorrtSession(spec, prefill, step, device)
    except DriverError as error:
        raise EngineError(
            f"engine: expected GPU memory for its caches, got {error}; free some, or {REBUILD} and a smaller "
            "--max-batch or --max-seq-len"
        ) from None


def _plugins(spec: EngineSpec) -> contextlib.AbstractContextManager[None]:
    """Our plugins, where plans need them from outside: those of TensorRT are inside its plans."""
    if spec.config["backend"] == "tensorrt" or not spec.config["plugins"]:
        return contextlib.nullcontext()
    from .plugins import registered

    return registered()


class TensorrtSession(Session):
    """See `Session`. Each number of rows has an execution context and a CUDA graph of its own. A step verifies all
    nodes."""

    def __init__(self, spec: EngineSpec, prefill: Plan, step: Plan, device: Driver):
        super().__init__(spec)
        self._step, self.device, self.stream = step, device, device.stream()
        weakref.finalize(self, device.free_stream, self.stream).atexit = False
        self._prefill = execution(prefill, captures=False)
        self._graphs = CudaGraphs(self._capture, (DriverError, EngineError))
        self._replays: dict[int, Callable[[], None]] = {}
        self.state: dict[str, DeviceArray] = {t.name: self._new(t.shape, t.dtype) for t in spec.state}
        self.caches = {tensor.name: self._new(self._cache_shape(tensor), tensor.dtype) for tensor in spec.caches}
        self._shared = {t.name: self._new(t.shape, t.dtype) for t in spec.shared}
        for tensor in spec.state:
            if tensor.fill:
                for row in range(spec.max_batch):
                    self.state[tensor.name][row] = tensor.fill
        self._every = self.state | self._shared | self.caches
        in_place = set(self.caches) if spec.config["plugins"] else set[str]()
        written = {name.removeprefix(NEXT) for plan in (prefill, step) for name in plan.program.outputs}
        self._after = {
            name: array if name in in_place else self._new(array.shape, array.kind)
            for name, array in self._every.items()
            if name in written
        }
        self._report = self._new((spec.max_batch, step.engine.get_tensor_shape("report")[1]), "int64")
        self._tokens = self._new((1, spec.prefill_chunk), "int64")
        self._count = self._new((1,), "int64")
        self._nodes = self._new((1 + spec.nodes,), "int64")
        self._nodes.write(np.arange(1 + spec.nodes))
        self._positions = self._new((1 + spec.depth,), "int64")
        self._positions.write(np.arange(1 + spec.depth))

    def numpy(self, name: str, row: int) -> NDArray[Any]:
        return self.state[name].read(row + 1)[row]

    def prefill(self, row: int, tokens: Sequence[int], count: int, slots: int) -> None:
        self._tokens[0, : len(tokens)] = np.array(tokens, np.int64)
        self._count[0] = count
        extra = {"tokens": self._tokens.address, "count": self._count.address}
        addresses = self._addresses(self._prefill.plan, row, extra)
        self._prefill.bind({"tokens": (1, len(tokens))}, addresses, self.stream)
        self._prefill.run(self.stream)
        self._copy_back(self._prefill.plan, row, 1)

    def replay(self, rows: int, slots: int, nodes: int | None, catch_up: int) -> NDArray[np.int64]:
        # D + 1 positions are enough where nothing pauses: a row that is behind, in its first step, has no tree.
        assert nodes == self.spec.nodes and (catch_up or not self.spec.catch_up)
        if rows not in self._replays:
            self._replays[rows] = self._make_replay(rows)
        self._replays[rows]()
        return self._report.read(rows)  # the one device-to-host copy

    def _make_replay(self, rows: int) -> Callable[[], None]:
        """One step of the first rows."""
        step = execution(self._step, captures=True)
        shapes = {name: (rows, *array.shape[1:]) for name, array in (self.state | self.caches).items()}
        extra = {"report": self._report.address, "nodes": self._nodes.address, "catch_up": self._positions.address}
        step.bind(shapes, self._addresses(self._step, 0, extra), self.stream)

        def run() -> None:
            step.run(self.stream)
            self._copy_back(self._step, 0, rows)

        return run if step.captures else self._graphs.of(run)

    def _capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Records a call as a CUDA graph. A plan without plugins has a loop, which TensorRT may refuse to capture."""
        graph = self.device.capture(run, self.stream)
        replay = functools.partial(self.device.launch_graph, graph, self.stream)
        weakref.finalize(replay, self.device.free_graph, graph).atexit = False
        return replay

    def read(self, rows: int, slots: int) -> Tensors:
        tensors = {name: array.read(rows) for name, array in (self.state | self.caches).items()}
        return tensors | self.read_shared() | {name: tensors[name][:, :, :slots].copy() for name in self.caches}

    def write(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        for name, values in tensors.items():
            self._every[name].write(values)

    def read_shared(self) -> Tensors:
        return {name: array.read(array.shape[0]) for name, array in self._shared.items()}

    def write_shared(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        self.write(tensors)

    def clear(self, row: int, slots: int) -> None:
        for cache in self.caches.values():
            cache.clear(row)

    def copy(self, source: int, target: int, slots: int) -> None:
        for array in self.state.values():
            self.device.copy(array.row(target), array.row(source), array.row_bytes, self.stream)
        for cache in self.caches.values():
            self._copy_slots(cache, target, 0, cache, source, 0, slots)

    def make_store(self, slots: int) -> None:
        shapes = {t.name: ((1, t.shape[1], slots, t.shape[3]), t.dtype) for t in self.spec.caches}
        try:
            self._store = {name: self._new(*shape) for name, shape in shapes.items()}
        except DriverError as error:
            raise EngineError(f"engine: expected GPU memory for kept prefixes, got {error}; keep fewer") from None

    def keep(self, row: int, start: int, place: int, count: int) -> None:
        for name, store in self._store.items():
            self._copy_slots(store, 0, place, self.caches[name], row, start, count)

    def recall(self, row: int, start: int, place: int, count: int) -> None:
        for name, store in self._store.items():
            self._copy_slots(self.caches[name], row, start, store, 0, place, count)

    def _copy_slots(
        self, target: DeviceArray, row: int, start: int, source: DeviceArray, its_row: int, its_start: int, count: int
    ) -> None:
        """Copy `count` slots of each head of a row of one cache to another."""
        size = source.row_bytes // (source.shape[1] * source.shape[2])
        for head in range(source.shape[1]):
            to = target.row(row) + (head * target.shape[2] + start) * size
            place = source.row(its_row) + (head * source.shape[2] + its_start) * size
            self.device.copy(to, place, count * size, self.stream)

    def _addresses(self, plan: Plan, row: int, extra: dict[str, int]) -> dict[str, int]:
        """What a plan reads and writes, from a row on, by name."""
        first = {name: 0 if name in self._shared else row for name in self._every}
        read = {name: self._every[name].row(first[name]) for name in plan.inputs if name not in extra}
        written = {name: name.removeprefix(NEXT) for name in plan.program.outputs if name not in extra}
        return extra | read | {name: self._after[key].row(first[key]) for name, key in written.items()}

    def _copy_back(self, plan: Plan, row: int, rows: int) -> None:
        """Put what a plan wrote elsewhere where it is read."""
        for name in (name.removeprefix(NEXT) for name in plan.program.outputs):
            if name in self._every and self._every[name] is not self._after[name]:
                target, source = self._every[name], self._after[name]
                first, count = (0, target.shape[0]) if name in self._shared else (row, rows)
                self.device.copy(target.row(first), source.row(first), count * target.row_bytes, self.stream)

    def _cache_shape(self, tensor: TensorSpec) -> tuple[int, ...]:
        return (*tensor.shape[:2], self.spec.most_slots, *tensor.shape[3:])

    def _new(self, shape: Sequence[int], dtype: str) -> DeviceArray:
        return DeviceArray(self.device, self.stream, shape, dtype)
