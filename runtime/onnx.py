"""Run engines in ONNX Runtime: the session over numpy buffers, without torch.

The programs write nothing in place: they return each state tensor and cache anew. Two sets of state tensors take turns
as inputs and outputs, bound once for each number of rows, slots, nodes and positions. Of the caches there is one set,
both input and output: a program reads a cache once, before it writes it (`compile/onnx/lower.py` checks that).
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from ..errors import EngineError, one_line
from ..progress import OnProgress
from .buffers import Tensors
from .engine_file import LAYOUT, NEXT, REBUILD, WEIGHTS, EngineSpec, Manifest, ProgramSpec, TensorSpec, layout_of
from .gpu import refuse_gpu
from .recent import Recent
from .session import Session

PROVIDERS = ["CPUExecutionProvider"]
MOST_SIZES = 256  # of steps whose bindings are kept

Size = tuple[int, int | None, int]  # of a step: rows, nodes, positions to catch up


def machine() -> dict[str, Any]:
    """What an engine's `requires` is compared with."""
    return {"providers": onnxruntime.get_available_providers()}


def open_session(directory: Path, manifest: Manifest, gpu: int | None, progress: OnProgress) -> Session:
    """Open the programs; they map the weights file. Raises EngineError for what ONNX Runtime does not take."""
    refuse_gpu(gpu)
    spec = manifest.spec
    with ThreadPoolExecutor() as pool:  # ONNX Runtime takes one core to open a model
        return OnnxSession(spec, *pool.map(partial(_open, directory, spec), spec.programs.values()))


def _open(directory: Path, spec: EngineSpec, program: ProgramSpec) -> onnxruntime.InferenceSession:
    path = directory / program.file
    options = onnxruntime.SessionOptions()
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # as torch does; a list is for nested loops
    options.intra_op_num_threads = int(threads) if threads.isdecimal() else 0  # 0: all cores
    options.log_severity_level = 3
    if program is spec.prefill:  # no second, packed copy of weights (see `compile/onnx/ops.py`)
        options.add_session_config_entry("session.disable_prepacking", "1")
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=PROVIDERS)
    except Exception as error:  # ONNX Runtime's errors have no common base
        raise EngineError(
            f"{path}: expected a model that ONNX Runtime loads, got {one_line(error)}; {REBUILD}"
        ) from None
    _check(path, session, spec, program)
    _check_weights(directory / WEIGHTS, session)
    return session


def _check(path: Path, session: onnxruntime.InferenceSession, spec: EngineSpec, program: ProgramSpec) -> None:
    """The model's inputs and outputs are those of the manifest. Raises EngineError."""
    for side, expected, got in (
        ("inputs", program.inputs, [value.name for value in session.get_inputs()]),
        ("outputs", program.outputs, [value.name for value in session.get_outputs()]),
    ):
        if list(expected) != got:
            name, found = next(pair for pair in zip_longest(expected, got) if pair[0] != pair[1])
            raise EngineError(f"{path}: {side}: expected {name} as in the manifest, got {found}; {REBUILD}")
    tensors = {tensor.name: tensor for tensor in (*spec.state, *spec.shared, *spec.caches)}
    for value in session.get_inputs():
        if value.name in tensors:
            tensor = tensors[value.name]
            sizes = zip(tensor.shape[1:], value.shape[1:], strict=False)
            wrong = len(tensor.shape) != len(value.shape) or any(isinstance(m, int) and n != m for n, m in sizes)
            kind = f"tensor({_onnx_type(tensor.dtype)})"
            if wrong or value.type != kind:
                raise EngineError(
                    f"{path}: {value.name}: expected {kind} {list(tensor.shape)} as in the manifest, got {value.type} "
                    f"{value.shape}; {REBUILD}"
                )


def _check_weights(path: Path, session: onnxruntime.InferenceSession) -> None:
    """The weights lie where the model reads them. Raises EngineError."""
    try:
        fits = layout_of(path) == session.get_modelmeta().custom_metadata_map.get(LAYOUT)
    except OSError as error:
        raise EngineError(f"{path}: {one_line(error)}; copy it again or {REBUILD}") from None
    if not fits:
        raise EngineError(f"{path}: expected tensors where the models read them, got another header; {REBUILD}")


def _onnx_type(dtype: str) -> str:
    return {"float32": "float"}.get(dtype, dtype)


class OnnxSession(Session):
    """See `Session`. The caches have as many slots as the last call needed; a call that needs more, or fewer, moves
    them to buffers of that size."""

    def __init__(
        self,
        spec: EngineSpec,
        prefill: onnxruntime.InferenceSession,
        step: onnxruntime.InferenceSession,
        plain: "onnxruntime.InferenceSession | None" = None,
    ):
        super().__init__(spec)
        self._prefill, self._step, self._plain = prefill, step, plain
        first = {tensor.name: _allocate(tensor) for tensor in (*spec.state, *spec.shared)}
        second = {name: array.copy() if NEXT + name in spec.step.outputs else array for name, array in first.items()}
        report = next(value.shape for value in step.get_outputs() if value.name == "report")
        self._report = np.empty((spec.max_batch, report[1]), np.int64)
        self._shared = {tensor.name for tensor in spec.shared}
        self._sets: list[Tensors] = [first, second]
        self._turn = 0  # of the set that the next step reads; it writes the other
        self._nodes, self._positions = np.arange(1 + spec.nodes), np.arange(-1, spec.catch_up)
        self._bindings: Recent[Size, list[onnxruntime.IOBinding]] = Recent(MOST_SIZES)  # of each turn
        self._slots_bound = 0

    @property
    def state(self) -> Tensors:  # type: ignore[override]
        """State, what all rows share, and caches as they are now."""
        return self._sets[self._turn]

    def numpy(self, name: str, row: int) -> NDArray[Any]:
        return self.state[name][row].copy()

    def prefill(self, row: int, tokens: Sequence[int], count: int, slots: int) -> None:
        # As many slots as the step that follows needs: caches that grow are copied.
        self._use_slots(max(slots, self.slots_for(max(self.lengths) + self.spec.scratch)))
        now, after = (self._rows(buffers, slice(row, row + 1)) for buffers in (self.state, self._sets[1 - self._turn]))
        now |= {"tokens": np.array([tokens], np.int64), "count": np.array([count], np.int64)}
        self._prefill.run_with_iobinding(_bind(self._prefill, self.spec.prefill, now, after))
        caches = {tensor.name for tensor in self.spec.caches}
        for name in {output.removeprefix(NEXT) for output in self.spec.prefill.outputs} - caches:
            now[name][:] = after[name]

    def clear(self, row: int, slots: int) -> None:
        for tensor in self.spec.caches:
            self.state[tensor.name][row, :, :slots] = 0

    def copy(self, source: int, target: int, slots: int) -> None:
        for tensor in self.spec.state:
            self.state[tensor.name][target] = self.state[tensor.name][source]
        for tensor in self.spec.caches:
            cache = self.state[tensor.name]
            cache[target, :, :slots] = cache[source, :, :slots]

    def make_store(self, slots: int) -> None:
        self._store = {t.name: np.zeros((t.shape[1], slots, t.shape[3]), t.dtype) for t in self.spec.caches}

    def keep(self, row: int, start: int, place: int, count: int) -> None:
        for name, store in self._store.items():
            store[:, place : place + count] = self.state[name][row, :, start : start + count]

    def recall(self, row: int, start: int, place: int, count: int) -> None:
        self._use_slots(max(self.slots_for(start + count), self._slots_bound))
        for name, store in self._store.items():
            self.state[name][row, :, start : start + count] = store[:, place : place + count]

    def replay(self, rows: int, slots: int, nodes: int | None, catch_up: int) -> NDArray[np.int64]:
        # What the longest row holds must stay, also where it takes no part.
        self._use_slots(max(slots, self.slots_for(max(self.lengths) + self.spec.scratch)))
        program, run = self.spec.step, self._step
        if nodes is None and self.spec.plain and self._plain:
            program, run = self.spec.plain, self._plain
        size = rows, nodes, catch_up
        bindings = self._bindings.get(size, lambda: self._bind_turns(run, program, size))
        run.run_with_iobinding(bindings[self._turn])
        now, after = self.state, self._sets[1 - self._turn]
        for tensor in self.spec.state:  # rows that take no part in the step, and what it does not return
            if NEXT + tensor.name in self.spec.step.outputs:
                part = slice(rows if NEXT + tensor.name in program.outputs else 0, None)
                after[tensor.name][part] = now[tensor.name][part]
        self._turn = 1 - self._turn
        return self._report[:rows].copy()

    def read(self, rows: int, slots: int) -> Tensors:
        self._use_slots(max(slots, self._slots_bound))  # fewer would cut what rows have in their caches
        caches = {tensor.name for tensor in self.spec.caches}
        views = self._rows(self.state, slice(rows))
        return {name: (a[:, :, :slots] if name in caches else a).copy() for name, a in views.items()}

    def write(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        if self.spec.caches:
            self._use_slots(tensors[self.spec.caches[0].name].shape[2])
        for name, values in tensors.items():
            self.state[name][: len(values)] = values

    def read_shared(self) -> Tensors:
        return {name: self.state[name].copy() for name in self._shared}

    def write_shared(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        for name, values in tensors.items():
            self.state[name][:] = values

    def _rows(self, buffers: Tensors, rows: slice) -> Tensors:
        return {name: array if name in self._shared else array[rows] for name, array in buffers.items()}

    def _bind_turns(
        self, run: onnxruntime.InferenceSession, program: ProgramSpec, size: Size
    ) -> list[onnxruntime.IOBinding]:
        """A step of this size, for each turn."""
        return [_bind(run, program, *self._bound(*size, *pair)) for pair in (self._sets, reversed(self._sets))]

    def _bound(
        self, rows: int, nodes: int | None, catch_up: int, now: Tensors, after: Tensors
    ) -> tuple[Tensors, Tensors]:
        """What a step of this size reads, and what it writes."""
        now, after = (self._rows(buffers, slice(rows)) for buffers in (now, after | {"report": self._report}))
        positions = self._positions[1 : 1 + catch_up] if catch_up else self._positions[:1]
        return now | {"nodes": self._nodes[: 1 + (nodes or 0)], "catch_up": positions}, after

    def _use_slots(self, slots: int) -> None:
        """Give the caches this many slots."""
        if slots == self._slots_bound:
            return
        now, after = self.state, self._sets[1 - self._turn]
        for tensor in self.spec.caches:
            batch, heads, _, size = tensor.shape
            new = np.zeros((batch, heads, slots, size), tensor.dtype)
            if self._slots_bound:
                kept = min(slots, self._slots_bound)
                new[:, :, :kept] = now[tensor.name][:, :, :kept]
            now[tensor.name] = after[tensor.name] = new
        self._slots_bound = slots
        self._bindings.clear()


def _bind(
    session: onnxruntime.InferenceSession, program: ProgramSpec, now: Tensors, after: Tensors
) -> onnxruntime.IOBinding:
    """Inputs and outputs of a program bound to arrays, which stay theirs: nothing is copied."""
    binding = session.io_binding()
    for name in program.inputs:
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(now[name]))
    for name in program.outputs:
        binding.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(after[name.removeprefix(NEXT)]))
    return binding


def _allocate(tensor: TensorSpec) -> NDArray[Any]:
    return np.full(tensor.shape, tensor.fill, tensor.dtype)
