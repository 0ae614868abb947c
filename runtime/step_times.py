"""How long a step takes here, by its rows, its nodes and the length of its rows: measured once, kept in the user's
cache, corrected by the steps that follow."""

import contextlib
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..user_cache import cache_path, keep
from .session import Session

BUDGET_S = 1.5  # of a first measurement, but for the first step, which maps the weights
SHORT = 32  # tokens in the cache of rows that are measured
ROUNDS = 8  # most times that each size is measured
FAST, SLOW = 0.1, 0.05  # shares of a surprise in what all rungs have in common, and in one rung's own
FORGET = 0.999  # a rung that is no longer chosen gets another chance
WRONG = 0.1  # a correction, as a logarithm, that is worth keeping


class StepTimes:
    """Seconds of a step: a table by rows and nodes for rows of SHORT tokens, and what each further token of a row adds,
    to a step of no nodes and to one of all."""

    def __init__(self, rungs: Sequence[int], table: Mapping[int, Sequence[float]], slopes: tuple[float, float]):
        """rungs: numbers of nodes, rising. table: rows -> seconds for each of the rungs."""
        self.rungs, self.slopes = tuple(rungs), slopes
        self.table = {rows: np.array(times, np.float64) for rows, times in sorted(table.items())}
        # Logarithms of what steps took against the table: those of so many rows alike, and each rung beyond that.
        self._common = dict.fromkeys(self.table, 0.0)
        self._own = {rows: np.zeros(len(self.rungs)) for rows in self.table}

    def seconds(self, rows: int, length: float) -> NDArray[np.float64]:
        """Of a step of so many rows with `length` tokens each on average, for each of the rungs."""
        rows = self._known(rows)
        return self._expected(rows, length) * np.exp(self._own[rows])

    def observe(self, rows: int, rung: int, length: float, seconds: float) -> None:
        """Correct the table by what a step took."""
        rows, place = self._known(rows), self.rungs.index(rung)
        off = math.log(min(max(seconds / self._expected(rows, length)[place], 0.25), 4.0))
        own = self._own[rows]
        own *= FORGET
        surprise = off - self._common[rows] - own[place]  # a busy machine, or this rung alone: some of it goes to each
        self._common[rows] += FAST * surprise
        own[place] += SLOW * surprise

    @property
    def wrong(self) -> bool:
        """Whether the table has proved wrong: rungs do not relate as it says."""
        return any(np.ptp(own) > WRONG for own in self._own.values())

    def to_dict(self) -> dict[str, Any]:
        """For JSON, corrections included."""
        table = {rows: (times * np.exp(self._own[rows])).tolist() for rows, times in self.table.items()}
        return {"rungs": self.rungs, "table": table, "slopes": self.slopes}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "StepTimes":
        """The inverse of `to_dict`. Raises ValueError, KeyError or TypeError for anything else."""
        table = {int(rows): [float(seconds) for seconds in times] for rows, times in data["table"].items()}
        first, last = map(float, data["slopes"])
        times = cls([int(rung) for rung in data["rungs"]], table, (first, last))
        sound = table and all(len(row) == len(times.rungs) and min(row) > 0 for row in table.values())
        if not sound or list(times.rungs) != sorted(set(times.rungs)):
            raise ValueError("expected a row of positive times for each number of rows")
        return times

    def _known(self, rows: int) -> int:
        """The least number of rows in the table that holds so many."""
        return min((known for known in self.table if known >= rows), default=max(self.table))

    def _expected(self, rows: int, length: float) -> NDArray[np.float64]:
        """What the table says."""
        part = np.array(self.rungs) / max(self.rungs[-1], 1)
        slopes = self.slopes[0] + (self.slopes[1] - self.slopes[0]) * part
        times = self.table[rows]
        return np.maximum(times + rows * slopes * (length - SHORT), 0.2 * times)


def kept_or_measured(
    session: Session, rungs: Sequence[int], identity: str, report: Callable[[str], None]
) -> tuple[StepTimes, Path]:
    """The times of an idle session's steps on this machine, and where they are kept. They are measured where none are
    kept that fit. identity: what tells engines apart."""
    path = times_path(identity)
    try:
        times = StepTimes.from_dict(json.loads(path.read_text()))
        if times.rungs == tuple(rungs):
            return times, path
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # nothing is kept, or nothing of use
    report("measuring steps on this machine, once")
    times = measure(session, rungs)
    keep_times(times, path)
    return times, path


def keep_times(times: StepTimes, path: Path) -> None:
    """Keep what is known for the next process, where there is a place for it."""
    with contextlib.suppress(OSError):  # then the next process measures again
        keep(path, json.dumps(times.to_dict()).encode())


def times_path(identity: str) -> Path:
    """Where the times of an engine on this machine, with these threads, lie."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.is_file() else []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    here = [identity, platform.machine(), *names[:1], cores, os.environ.get("OMP_NUM_THREADS", "")]
    return cache_path("steps", f"{hashlib.sha256(json.dumps(here).encode()).hexdigest()[:32]}.json")


def measure(session: Session, rungs: Sequence[int], budget: float = BUDGET_S) -> StepTimes:
    """Time steps of an idle session, for `budget` seconds and one step, which has everything loaded. What there is no
    time for is taken to cost what as many tokens cost elsewhere."""
    most = session.spec.max_batch
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]
    ends = list(dict.fromkeys((rungs[0], rungs[-1])))
    first = [(rows, rung) for rows in dict.fromkeys((1, most, *sizes)) for rung in ends]
    short = [*first, *((rows, rung) for rows in sizes for rung in rungs[1:-1])]
    long = max(SHORT, min(1024, 3 * session.spec.max_seq_len // 4))
    _time_step(session, 1, rungs[-1], SHORT, 0.0)
    begin, found = time.perf_counter(), dict[tuple[int, int, int], float]()
    for length, cells, share in ((SHORT, short, 0.8), (long, [(1, rung) for rung in ends], 1.0)):
        _time_rounds(session, [(*cell, length) for cell in cells], begin + share * budget, found)
    return _fitted(found, rungs, sizes, long)


def _time_rounds(
    session: Session, cells: Sequence[tuple[int, int, int]], end: float, found: dict[tuple[int, int, int], float]
) -> None:
    """Time steps of (rows, rung, length), in turn, until `end`, each a few times, the first two at least once."""
    for _ in range(ROUNDS):
        for place, (rows, rung, length) in enumerate(cells):
            key = rows, rung, length
            if time.perf_counter() > end and (place > 1 or key in found):
                return
            found[key] = min(_time_step(session, rows, rung, length, end), found.get(key, math.inf))


def _time_step(session: Session, rows: int, rung: int, length: int, end: float) -> float:
    """Seconds of a step of so many rows, with `length` tokens each or as many as an engine takes: of a second one where
    there is time, for the first may have things to set up."""
    length, taken, spent = max(min(length, session.spec.max_seq_len - 3), 0), list[int](), math.inf
    try:
        for _ in range(rows):
            row = session.begin([2] * (length + 1), session.spec.max_seq_len, [])
            taken.append(row)
            session.resume(row, length, [])
            session.fill(row, session.spec.prefill_chunk)
        for _ in range(2):
            begin = time.perf_counter()
            session.step(rung)
            now = time.perf_counter()
            spent = min(spent, now - begin)
            if now > end:
                break
    finally:
        for row in taken:
            session.release(row)
    return spent


def _fitted(
    found: Mapping[tuple[int, int, int], float], rungs: Sequence[int], sizes: Sequence[int], long: int
) -> StepTimes:
    """The table of what was found."""
    short = {(rows, rung): seconds for (rows, rung, length), seconds in found.items() if length == SHORT}
    points = sorted((rows * (1 + rung), seconds) for (rows, rung), seconds in short.items())
    tokens, seconds = (np.array(column) for column in zip(*points, strict=True))
    slope, base = np.polyfit(tokens, seconds, 1) if len(set(tokens)) > 1 else (0.0, seconds[0])

    def guessed(count: int) -> float:
        inside = tokens[0] <= count <= tokens[-1]
        return float(np.interp(count, tokens, seconds) if inside else max(base + slope * count, seconds[-1]))

    table = {
        rows: [short.get((rows, rung)) or guessed(rows * (1 + rung)) for rung in rungs] for rows in map(int, sizes)
    }
    first, last = (
        max(found[1, rung, long] - short[1, rung], 0.0) / max(long - SHORT, 1) for rung in (rungs[0], rungs[-1])
    )
    return StepTimes(rungs, table, (first, last))
