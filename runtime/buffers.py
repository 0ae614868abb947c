"""What a backend does for a session: its buffers, and its programs over them.

Nothing here knows a model: names, shapes and order come from the `EngineSpec`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy import int64
from numpy.typing import NDArray

from .engine_file import EngineSpec

Tensors = dict[str, NDArray[Any]]  # state and caches by name; bfloat16 as float32, which numpy has


class Buffers:
    """State and caches of all rows, and what is done to them; a backend fills in what raises NotImplementedError here.
    `state` holds the state's tensors by name, [B, ...] each. What all rows share is part of what is read and
    written."""

    spec: EngineSpec
    state: dict[str, Any]
    overlaps = False  # whether a step runs beside the host, so that the next may be begun before its report is read
    captured = 0  # sizes of a step that were recorded so far: the first step of each takes longer

    def enter_thread(self) -> None:
        """Called by a thread before its first call of anything else here."""

    def leave_thread(self) -> None:
        """Called by a thread that hands work to another one, which will be the next to call."""

    def close(self) -> None:
        """End what was started for it. Nothing is called afterwards."""

    def conditions(self) -> list[Any]:
        """What the time of a step depends on beside the engine and the processor, for JSON."""
        return []

    def set(self, name: str, row: int, values: Any) -> None:
        """Fill a row of a state tensor with a number, or write a list or an array to the front of it. Here tensors are
        written to as numpy's are."""
        given = np.asarray(values)
        if given.size:
            self.state[name][(row, slice(len(given))) if given.ndim else row] = given

    def numpy(self, name: str, row: int) -> NDArray[Any]:
        """A copy of one row of a state tensor."""
        raise NotImplementedError

    def prefill(self, row: int, tokens: Sequence[int], count: int, slots: int) -> None:
        """Run one chunk of a row's prompt over the first `slots` slots: its tokens, of which the first `count` are the
        next ones of the row."""
        raise NotImplementedError

    def replay(self, rows: int, slots: int, nodes: int | None, catch_up: int) -> NDArray[int64]:
        """Run one step of the first `rows` rows over the first `slots` slots, which verifies the first `nodes` nodes of
        each drafted tree, the root not counted, and drafts the next trees; a drafter that pauses catches up with so
        many positions at most, or is left out for 0. nodes: None for the plain step -> the report."""
        raise NotImplementedError

    def begin_replay(self, rows: int, slots: int, nodes: int | None, catch_up: int) -> Callable[[], NDArray[int64]]:
        """Begin a `replay` of this size -> what waits for its report. Here that is there at once."""
        report = self.replay(rows, slots, nodes, catch_up)
        return lambda: report

    def read(self, rows: int, slots: int) -> Tensors:
        """Copies of what a replay of this size would read."""
        raise NotImplementedError

    def write(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `read` gave, here or in a session of another backend, for a replay of that size."""
        raise NotImplementedError

    def read_shared(self) -> Tensors:
        """Copies of what all rows share."""
        raise NotImplementedError

    def write_shared(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Put what `read_shared` gave in its place."""
        raise NotImplementedError

    def clear(self, row: int, slots: int) -> None:
        """Fill the first slots of a row's caches with zeros."""
        raise NotImplementedError

    def copy(self, source: int, target: int, slots: int) -> None:
        """Copy a row's state, and the first slots of its caches, to another row."""
        raise NotImplementedError

    def make_store(self, slots: int) -> None:
        """Allocate so many further slots of each cache, which belong to no row: the store."""
        raise NotImplementedError

    def keep(self, row: int, start: int, place: int, count: int) -> None:
        """Copy a row's slots, `count` from `start` on, to the store's from `place` on."""
        raise NotImplementedError

    def recall(self, row: int, start: int, place: int, count: int) -> None:
        """Copy the store's slots, `count` from `place` on, to a row's from `start` on."""
        raise NotImplementedError
