"""Times a step: each operator of ours, and the compiled code between two of them.

A step makes the same calls in the same order every time: call k of one step and of the next are the same place in the
graph. What is timed is one step, repeated: its state is put back before each.
"""

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import EngineError
from ...kernels.recording import RecordedCall, can_record, record
from ..engine_file import REBUILD
from .aoti import LoadedProgram
from .openmp import one_thread, release_threads
from .step_parts import PROFILED_STAGES, Part, step_parts, weight_bytes
from .torch_session import Program, TorchSession

COLD = 2**26  # int64s of a read that no cache holds
READS, WARM = 20, 2  # reads of memory while the steps are timed; untimed steps after each


@dataclass(frozen=True)
class Profile:
    """One step, timed."""

    tokens: int  # in the cache of each row
    rows: int  # that take part
    slots: int  # of the caches that the step is given
    threads: int  # that it runs on
    step_s: float  # median seconds of a step
    recorded_s: float  # mean of the middle half of the recorded steps, to which the parts add up
    weights: int  # bytes of the weights that linear layers read, each once
    read_s: float  # median seconds in which all threads read as much memory that no cache holds
    parts: tuple[Part, ...]

    def stages(self) -> dict[str, float]:
        """Seconds of each stage."""
        return {name: sum(part.seconds for part in self.parts if part.stage == name) for name in PROFILED_STAGES}


class _Step(NamedTuple):
    """A recorded step: its begin and end, those of the program in it, and the program's calls."""

    begin: int
    end: int
    program: tuple[int, int]
    calls: list[RecordedCall]

    def times(self) -> list[int]:
        """Nanoseconds, which add up to the step: what leads to each call and the call, the program's rest, the host."""
        begin, end = self.program
        edges = [begin, *(edge for call in self.calls for edge in (call.begin, call.end)), end]
        return [*(b - a for a, b in itertools.pairwise(edges)), self.end - self.begin - (end - begin)]


class _Watched:
    """A program that notes when it ran last."""

    def __init__(self, program: Program):
        self.program, self.span = program, (0, 0)

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        begin = time.perf_counter_ns()
        outputs = self.program(inputs)
        self.span = begin, time.perf_counter_ns()
        return outputs


def profile(session: TorchSession, tokens: int, rows: int, nodes: int, steps: int) -> Profile:
    """Time a step of an idle session, on a CPU: `rows` prompts with `tokens` tokens in the cache, one more as the root,
    and so many nodes of their trees.

    steps: how many are timed, and how many more recorded, in turn. Raises EngineError where the library cannot record.
    """
    program = session.step_program
    if not can_record() or not isinstance(program, LoadedProgram):
        raise EngineError(
            f"profile: expected an engine whose library records its ops, got one of an earlier version; {REBUILD}"
        )
    session.step_program = watched = _Watched(program)
    try:
        for row in range(rows):
            session.admit(_prompt(session.spec.vocab_size, tokens + 1, row), session.spec.max_seq_len, [])
        slots = session.next_size()[1]
        plain, recorded, reads = _time_steps(session, watched, nodes, steps)
    finally:
        session.step_program = program
        for row in range(rows):
            session.release(row)
    calls, times = recorded[0].calls, _middle([step.times() for step in recorded])
    names = {tensor.data_ptr(): name for name, tensor in program.weights.items() if tensor.numel()}
    size = weight_bytes(calls, names) or sum(tensor.nbytes for tensor in program.weights.values())
    return Profile(
        tokens,
        rows,
        slots,
        torch.get_num_threads(),
        step_s=statistics.median(plain),
        recorded_s=sum(times),
        weights=size,
        read_s=statistics.median(reads) * size / (COLD * 8),
        parts=tuple(step_parts(calls, times, names)),
    )


def _middle(steps: list[list[int]]) -> list[float]:
    """The mean of each column, in seconds from nanoseconds, without the fastest and the slowest quarter."""
    steps = sorted(steps, key=sum)
    quarter = len(steps) // 4
    return [statistics.mean(column) / 1e9 for column in zip(*steps[quarter : len(steps) - quarter], strict=True)]


def _prompt(vocabulary: int, length: int, row: int) -> list[int]:
    """Tokens that hardly repeat."""
    return [(2 + row + index * 7919) % vocabulary for index in range(length)]


class _Repeated:
    """The next step of a session, run again and again. span: when it ran last, in nanoseconds."""

    def __init__(self, session: TorchSession, nodes: int):
        self._session, self._nodes, self._lengths = session, nodes, list(session.lengths)
        self._buffers = session.state | session.shared
        self._before = {name: tensor.clone() for name, tensor in self._buffers.items()}
        self.span = 0, 0

    def __call__(self) -> None:
        with one_thread():  # another one would spin on into the step, on a core that the step needs
            for name, tensor in self._buffers.items():
                tensor.copy_(self._before[name])
        self._session.lengths[:] = self._lengths
        begin = time.perf_counter_ns()
        self._session.step(self._nodes)
        self.span = begin, time.perf_counter_ns()


def _time_steps(
    session: TorchSession, watched: _Watched, nodes: int, steps: int
) -> tuple[list[float], list[_Step], list[float]]:
    """Seconds of plain steps, recorded steps, and seconds of reads of memory, all in turn."""
    data, step = torch.ones(COLD, dtype=torch.int64), _Repeated(session, nodes)
    plain, recorded, reads = [], [], []
    for index in range(steps):
        if index % -(-steps // READS) == 0:
            begin = time.perf_counter()
            data.sum()
            reads.append(time.perf_counter() - begin)
            release_threads()
            for _ in range(WARM):
                step()
        step()
        plain.append((step.span[1] - step.span[0]) / 1e9)
        calls = record(step)
        recorded.append(_Step(*step.span, watched.span, calls))
    return plain, recorded, reads
