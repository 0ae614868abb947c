"""A session over torch tensors: static buffers, bound to programs that write the caches in place."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...controls import LAG
from ..buffers import Tensors
from ..cuda_graphs import CudaGraphs
from ..engine_file import EngineSpec, TensorSpec
from ..recent import Recent
from ..session import Session
from .cuda_graph import Reports, graph_capture
from .openmp import one_thread, release_threads
from .paged_cache import make_caches

Program = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # flat tensors in, flat tensors out, caches written in place
Size = tuple[int, int, int | None, int]  # of a step: rows, slots, nodes, positions to catch up
ALIGNMENT = 16  # bytes, of what a GPU's program is given
MOST_SIZES = 256  # whose views are kept, 40 KiB each; on a GPU, where steps are over whole caches, there are fewer


class TorchSession(Session):
    """See `Session`. On a GPU each size of a step, in rows, nodes and positions, is a CUDA graph over whole caches."""

    def __init__(self, spec: EngineSpec, prefill: Program, step: Program, plain: Program | None = None):
        super().__init__(spec)
        self._prefill, self.step_program, self._plain = prefill, step, plain
        gpu = spec.device == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        self.state: dict[str, Tensor] = {tensor.name: _allocate(tensor, self.device) for tensor in spec.state}
        self.shared = {tensor.name: _allocate(tensor, self.device) for tensor in spec.shared}
        self._caches = make_caches(spec.caches, self.device)
        self.caches = {name: cache.tensor for name, cache in self._caches.items()}
        self._nodes = torch.arange(1 + spec.nodes, device=self.device)
        self._positions = torch.arange(spec.catch_up, device=self.device)
        self._no_position = torch.tensor([-1], device=self.device)
        self._replays: Recent[Size, Callable[[], Tensor]] = Recent(MOST_SIZES)
        refusals = (RuntimeError,) if spec.ranks == 1 else ()  # what one rank captures, all do
        self._graphs = CudaGraphs(graph_capture(), refusals) if gpu else None
        self._reports: Reports | None = None  # on the host
        self.overlaps = gpu  # which runs beside the host

    def enter_thread(self) -> None:
        torch.get_num_threads()  # OpenMP's own setting is one per thread: this takes over the process's

    def leave_thread(self) -> None:
        release_threads()

    def conditions(self) -> list[Any]:
        return [torch.get_num_threads(), *([torch.cuda.get_device_name(self.device)] if self._graphs else [])]

    def set(self, name: str, row: int, values: Any) -> None:
        place, given = self.state[name][row], torch.as_tensor(values, dtype=self.state[name].dtype, device=self.device)
        if given.numel():
            (place[: len(given)] if given.ndim else place).copy_(given)

    def numpy(self, name: str, row: int) -> NDArray[Any]:
        return _numpy(self.state[name][row])

    def prefill(self, row: int, tokens: Sequence[int], count: int, slots: int) -> None:
        rows = slice(row, row + 1)
        given = {"tokens": [tokens], "count": [count]}
        inputs = self._views(rows, slots) | {name: torch.tensor(of, device=self.device) for name, of in given.items()}
        with self._current():
            outputs = self._prefill([_aligned(inputs[name]) for name in self.spec.prefill.inputs])
        for name, tensor in zip(self.spec.prefill.outputs, outputs, strict=True):
            self.state[name][rows] = tensor

    def replay(self, rows: int, slots: int, nodes: int | None, catch_up: int) -> NDArray[np.int64]:
        return self._run(rows, slots, nodes, catch_up).cpu().numpy()

    def begin_replay(self, rows: int, slots: int, nodes: int | None, catch_up: int) -> Callable[[], NDArray[np.int64]]:
        if self._graphs is None:
            return super().begin_replay(rows, slots, nodes, catch_up)
        with self._current():
            report = self._run(rows, slots, nodes, catch_up)
            self._reports = self._reports or Reports(self.spec.max_batch, report.shape[1])
            return self._reports.fetch(report)

    def _run(self, rows: int, slots: int, nodes: int | None, catch_up: int) -> Tensor:
        """A step of this size -> its report."""
        if self._graphs:  # kernels stop where a row ends: one graph for all lengths
            slots, catch_up = self.spec.most_slots, self._captured_catch_up(nodes or 0, catch_up)
        size = rows, slots, nodes, catch_up
        with self._current():
            return self._replays.get(size, lambda: self._make_replay(*size))()

    def _current(self) -> AbstractContextManager[Any]:
        """Has the engine's GPU be the current one, which is a thread's own."""
        return torch.cuda.device(self.device) if self._graphs else nullcontext()

    def _captured_catch_up(self, nodes: int, catch_up: int) -> int:
        """Positions to catch up that there is a graph for. For a depth of 7 and 3 nodes: 0; 5, a path of 4 and the one
        ahead of it, as in a row's first step; or 12, the path and the LAG, 8, that a drafter left out."""
        path = min(nodes, self.spec.depth) + 1
        return next(most for most in (0, 1 + path, LAG + path) if catch_up <= most)

    def read(self, rows: int, slots: int) -> Tensors:
        return {name: _numpy(tensor) for name, tensor in self._views(slice(rows), slots).items()}

    def write(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        every = self.state | self.shared | self.caches
        for name, values in tensors.items():
            every[name][tuple(slice(size) for size in values.shape)] = torch.from_numpy(values)

    def read_shared(self) -> Tensors:
        return {name: _numpy(tensor) for name, tensor in self.shared.items()}

    def write_shared(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        self.write(tensors)

    def clear(self, row: int, slots: int) -> None:
        with one_thread():
            for cache in self._caches.values():
                cache.clear(row, slots)

    def copy(self, source: int, target: int, slots: int) -> None:
        for tensor in self.state.values():
            tensor[target] = tensor[source]
        for cache in self.caches.values():
            cache[target, :, :slots] = cache[source, :, :slots]

    def make_store(self, slots: int) -> None:
        for cache in self._caches.values():
            cache.make_store(slots, self.spec.lookahead)

    def keep(self, row: int, start: int, place: int, count: int) -> None:
        for cache in self._caches.values():
            cache.keep(row, start, place, count)

    def recall(self, row: int, start: int, place: int, count: int) -> None:
        for cache in self._caches.values():
            cache.recall(row, start, place, count)

    def _reset(self, row: int) -> None:
        with one_thread():
            super()._reset(row)

    def _make_replay(self, rows: int, slots: int, nodes: int | None, catch_up: int) -> Callable[[], Tensor]:
        """One step of this size: the call, and the small state copied back into its buffers."""
        spec, plain = self.spec.step, self._plain if nodes is None else None
        if plain is not None:
            assert self.spec.plain is not None
            spec = self.spec.plain
        given = self._views(slice(rows), slots) | {"nodes": self._nodes[: 1 + (nodes or 0)]}
        given["catch_up"] = self._positions[:catch_up] if catch_up else self._no_position
        inputs, kept = [given[name] for name in spec.inputs], [given[name] for name in spec.outputs[1:]]

        def replay() -> Tensor:
            report, *state = (plain or self.step_program)(inputs)
            for buffer, value in zip(kept, state, strict=True):
                buffer.copy_(value)
            return report

        if self._graphs is None:
            return replay
        self.captured += 1
        return self._graphs.of(replay)

    def _views(self, rows: slice, slots: int) -> dict[str, Tensor]:
        """State and caches of some rows, the caches' first slots, and what all rows share."""
        state = {name: tensor[rows] for name, tensor in self.state.items()}
        return state | self.shared | {name: cache[rows, :, :slots] for name, cache in self.caches.items()}


def _allocate(spec: TensorSpec, device: torch.device) -> Tensor:
    return torch.full(spec.shape, spec.fill, dtype=getattr(torch, spec.dtype), device=device)


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor; on a GPU a copy of one that begins inside of 16 bytes, as a row's few numbers may: kernels load so
    many at once. A program would copy it itself, with a warning on stderr each time."""
    return tensor if tensor.device.type == "cpu" or tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def _numpy(tensor: Tensor) -> NDArray[Any]:
    """A copy on the host; bfloat16 as float32."""
    copied = tensor.to("cpu", torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype, copy=True)
    return copied.numpy()
