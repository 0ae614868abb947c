"""A session: an engine's buffers and its two programs. It admits prompts to rows and replays the step.

Nothing here knows a model: names, shapes and order come from the `EngineSpec`. Nor does it know a tensor library: what
is bound to the programs, and how, is the backend's (`torch_session.py`, `onnx_session.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from .engine_file import EngineSpec

Tensors = dict[str, NDArray[Any]]  # state and caches by name; bfloat16 as float32, which numpy has

RUNNING, FREE = 0, 3  # the finish codes that the session itself sets; a step may return others


class AcceptedNode(NamedTuple):
    """A drafted token that the target agreed with: its node in the tree, from 1 on, in a dynamic tree the place of its
    score among all; and its rank among the children of its parent, 0 the first choice."""

    node: int
    rank: int


class RowReport(NamedTuple):
    """What one step did to one row: its new tokens, why it ended (0: it runs on), and the drafted tokens that the
    target agreed with, by depth, before stop tokens and limits cut the output."""

    tokens: list[int]
    finish: int
    path: tuple[AcceptedNode, ...]

    @classmethod
    def read(cls, values: list[int]) -> "RowReport":
        """values: a row of the step's report."""
        count, finish, accepted, *rest = values
        levels = len(rest) // 3
        tokens, nodes, ranks = rest[:levels], rest[levels : 2 * levels], rest[2 * levels :]
        path = map(AcceptedNode, nodes[1 : accepted + 1], ranks[1 : accepted + 1])
        return cls(tokens[:count], finish, tuple(path))


IDLE = RowReport([], FREE, ())  # of a row that took no part in a step


class Session:
    """Rows of static buffers and one call per step. Rows are admitted and released one by one; the others never notice.

    A backend fills in `array`, `prefill`, `replay`, `read` and `write`. `state` holds its tensors by name, [B, ...]
    each.
    """

    state: dict[str, Any]

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self.lengths = [0] * spec.max_batch  # host copy, kept from the reports
        self._taken: set[int] = set()  # rows that were admitted and not released

    def array(self, values: Sequence[int]) -> Any:
        """Values as an int64 tensor of the backend, to be assigned to a part of the state."""
        raise NotImplementedError

    def prefill(self, row: int, tokens: Sequence[int], count: int, slots: int) -> None:
        """Run one chunk of a row's prompt over the first `slots` slots: its tokens, of which the first `count` are the
        next ones of the row."""
        raise NotImplementedError

    def replay(self, rows: int, slots: int) -> list[list[int]]:
        """Run one step of the first `rows` rows over the first `slots` slots -> the report."""
        raise NotImplementedError

    def read(self, rows: int, slots: int) -> Tensors:
        """Copies of what a replay of this size would read."""
        raise NotImplementedError

    def write(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `read` gave, here or in a session of another backend, for a replay of that size."""
        raise NotImplementedError

    def admit(self, row: int, tokens: Sequence[int], limit: int, stop_ids: Sequence[int]) -> None:
        """Give a free row its prompt (at least one token) and fill its caches with all but the last, which is the
        first root.

        limit: most tokens, prompt included, that the row may reach. The row takes part in the next step.
        """
        self.release(row)
        self.state["history"][row, : len(tokens)] = self.array(tokens)
        for start in range(0, len(tokens) - 1, self.spec.prefill_chunk):  # two tokens or more, as the graph wants
            chunk = tokens[start : start + self.spec.prefill_chunk]
            count = min(len(chunk), len(tokens) - 1 - start)
            self.prefill(row, chunk, count, self._slots(start + len(chunk)))
            self.lengths[row] += count
        self.state["limits"][row] = limit
        self.state["stop_ids"][row, : len(stop_ids)] = self.array(stop_ids)
        self.state["finish"][row] = RUNNING
        self._taken.add(row)

    def step(self) -> list[RowReport]:
        """Advance every running row -> one report per row, no tokens where the row is not running."""
        reports = [RowReport.read(row) for row in self.replay(*self.next_size())]
        for row, report in enumerate(reports):
            self.lengths[row] += len(report.tokens)
        return reports + [IDLE] * (self.spec.max_batch - len(reports))

    def release(self, row: int) -> None:
        """Empty a row; its cache slots need no clearing, a row sees only what was written for it."""
        for tensor in self.spec.state:
            self.state[tensor.name][row] = tensor.fill
        self.lengths[row] = 0
        self._taken.discard(row)

    def next_size(self) -> tuple[int, int]:
        """Rows and slots of the next step: the smallest power of 2, or all rows, that holds the rows in use, and the
        slots that the longest needs. A step costs what these cost, and there are few numbers of rows to bind or
        capture a step for."""
        rows = min(1 << max(self._taken, default=0).bit_length(), self.spec.max_batch)
        return rows, self._slots(max(self.lengths) + self.spec.scratch)

    def _slots(self, needed: int) -> int:
        """The smallest slot count a program may be given that holds `needed`: a step costs what the longest row
        needs."""
        return -(-needed // self.spec.slot_step) * self.spec.slot_step
