"""The session of an engine whose model several ranks share: the first, whose calls the others follow.

All ranks have the same state to the bit, so nothing but calls goes to the others, and nothing comes back.
"""

import os
import pickle
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import EngineError, one_line
from ...kernels.communicator import Communicator
from ...kernels.nccl import NcclCommunicator
from ..buffers import Tensors
from ..engine_file import EngineSpec
from ..inductor.openmp import on_threads
from ..inductor.torch_session import Program, TorchSession
from .arithmetic import Arithmetic
from .processes import PATIENCE, RankProcess, close_all, ended_first

MOST_HELD = 256  # calls that wait for the next program


class RankSession(TorchSession):
    """See `Session`. Raises EngineError from each call once a rank has ended."""

    def __init__(
        self,
        spec: EngineSpec,
        programs: Sequence[Program],
        communicator: Communicator | NcclCommunicator,
        others: Sequence[RankProcess],
        threads: int,
        alike: Arithmetic,
    ):
        """programs: the first rank's; others: the processes of the others, loaded; threads: of each rank; alike: how
        the others compute."""
        super().__init__(spec, *programs)
        self._communicator, self.others, self._threads = communicator, others, threads
        self._alike, self._held = alike, list[bytes]()
        self._failed: EngineError | None = None
        gpu = self.device if self._graphs else None
        self._end = weakref.finalize(self, _end, os.getpid(), communicator, others, gpu)

    def close(self) -> None:
        self._end()
        self._replays.clear()  # NCCL forgets a rank when the last graph is gone that it gathers in

    def enter_thread(self) -> None:
        super().enter_thread()
        # This thread inherited the mode of the one that started it, which may be another.
        torch.set_flush_denormal(self._alike.flush_denormals)

    def set(self, name: str, row: int, values: Any) -> None:
        self._hold("set", name, row, values.tolist() if isinstance(values, torch.Tensor) else values)
        super().set(name, row, values)

    def prefill(self, row: int, tokens: Sequence[int], count: int, slots: int) -> None:
        with self._together("prefill", row, list(tokens), count, slots):
            super().prefill(row, tokens, count, slots)

    def replay(self, rows: int, slots: int, nodes: int | None, catch_up: int) -> NDArray[np.int64]:
        with self._together("replay", rows, slots, nodes, catch_up):
            report = super().replay(rows, slots, nodes, catch_up)
            self._check_joined()
            return report

    def begin_replay(self, rows: int, slots: int, nodes: int | None, catch_up: int) -> Callable[[], NDArray[np.int64]]:
        if not self.overlaps:
            return super().begin_replay(rows, slots, nodes, catch_up)
        with self._together("begin_replay", rows, slots, nodes, catch_up):
            report = super().begin_replay(rows, slots, nodes, catch_up)

        def wait() -> NDArray[np.int64]:
            with self._ends_with_another():
                got = report()
                self._check_joined()
                return got

        return wait

    def read(self, rows: int, slots: int) -> Tensors:
        """As `TorchSession.read`, without the caches, of which each rank has its own heads."""
        every = super().read(rows, slots)
        return {name: values for name, values in every.items() if name not in self.caches}

    def write(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        if odd := sorted(tensors.keys() & self.caches.keys()):
            raise EngineError(f"write: expected state alone, of which all ranks have the same, got {odd[0]}")
        self._hold("write", dict(tensors))
        super().write(tensors)

    def clear(self, row: int, slots: int) -> None:
        self._hold("clear", row, slots)
        super().clear(row, slots)

    def copy(self, source: int, target: int, slots: int) -> None:
        self._hold("copy", source, target, slots)
        super().copy(source, target, slots)

    def make_store(self, slots: int) -> None:
        self._hold("make_store", slots)
        super().make_store(slots)

    def keep(self, row: int, start: int, place: int, count: int) -> None:
        self._hold("keep", row, start, place, count)
        super().keep(row, start, place, count)

    def recall(self, row: int, start: int, place: int, count: int) -> None:
        self._hold("recall", row, start, place, count)
        super().recall(row, start, place, count)

    def _hold(self, name: str, *arguments: object) -> None:
        """Have the others make a call, before their next program at the latest. The arguments may change afterwards.
        Raises EngineError once a rank has ended: the engine is at its end, too."""
        if self._failed is not None:
            raise self._failed
        self._held.append(pickle.dumps((name, arguments)))
        if len(self._held) >= MOST_HELD:
            self._send()

    def _send(self) -> None:
        """Send what is held. Raises EngineError where a rank has ended."""
        calls, self._held = self._held, []
        try:
            for each in self.others:
                each.send(calls)
        except EngineError as error:
            self._fail(error)
            raise

    def _fail(self, error: EngineError) -> None:
        self._failed = error
        self._end()

    @contextmanager
    def _together(self, name: str, *arguments: object) -> Iterator[None]:
        """Have the others run a program while this rank does."""
        self._hold(name, *arguments)
        self._send()
        with self._ends_with_another(), self._communicator.bound(), on_threads(self._threads):
            yield

    @contextmanager
    def _ends_with_another(self) -> Iterator[None]:
        """End this session where something fails: the others are elsewhere in their programs. Raises EngineError."""
        try:
            yield
        except BaseException as error:
            ended, said = ended_first(self.others), self._communicator.failure or one_line(error)
            reason = ended.ended() if ended else EngineError(f"ranks: expected a step of all, got {said}")
            self._fail(reason)
            raise reason from None

    def _check_joined(self) -> None:
        """Raises RuntimeError where this rank has left, since another one has ended: what a GPU gathered is none."""
        if not self._communicator.joined:
            raise RuntimeError("another rank has ended")


def _end(
    process: int,
    communicator: Communicator | NcclCommunicator,
    others: Sequence[RankProcess],
    gpu: torch.device | None,
) -> None:
    """End the ranks that this process started."""
    if os.getpid() != process:
        return
    if gpu is not None and communicator.joined:
        _wait_for(gpu)  # a step that was begun ends in all ranks
    communicator.leave()
    close_all(others)


def _wait_for(gpu: torch.device) -> None:
    """Wait until a GPU has nothing left to do, for PATIENCE seconds at most: a rank that hangs is killed."""
    with suppress(RuntimeError), torch.cuda.device(gpu):
        done = torch.cuda.Event()
        done.record()
        until = time.monotonic() + PATIENCE
        while not done.query() and time.monotonic() < until:
            time.sleep(0.001)
