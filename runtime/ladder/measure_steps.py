"""Measures how long steps take on this machine, once, and keeps it in the user's cache."""

import contextlib
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ...processor import processor_name
from ...progress import OnProgress
from ...report import WHOLE
from ...user_cache import cache_path, keep
from ..session import Session
from .step_times import SHORT, StepTimes

BUDGET_S = 3.0  # of a first measurement, but for the first step, which maps the weights
ROUNDS = 8  # most times that each size is measured


def kept_or_measured(
    session: Session, rungs: Sequence[int], identity: str, progress: OnProgress
) -> tuple[StepTimes, Path]:
    """The times of an idle session's steps on this machine, and where they are kept. They are measured where none are
    kept that fit. identity: what tells engines apart."""
    path = times_path(identity, session)
    try:
        times = StepTimes.from_dict(json.loads(path.read_text()))
        if (times.rungs, times.draft_kinds) == (tuple(rungs), session.draft_kinds):
            return times, path
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        pass  # nothing is kept, or nothing of use
    progress("measuring steps on this machine, once")
    times = measure(session, rungs)
    keep_times(times, path)
    return times, path


def keep_times(times: StepTimes, path: Path) -> None:
    """Keep what is known for the next process, where there is a place for it."""
    with contextlib.suppress(OSError):  # then the next process measures again
        keep(path, json.dumps(times.to_dict()).encode())


def times_path(identity: str, session: Session) -> Path:
    """Where the times of an engine on this machine, under the conditions of its session, lie."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    here = [
        identity,
        platform.machine(),
        processor_name(),
        cores,
        os.environ.get("OMP_NUM_THREADS", ""),
        session.conditions(),
    ]
    return cache_path("steps", f"{hashlib.sha256(json.dumps(here).encode()).hexdigest()[:32]}.json")


def measure(session: Session, rungs: Sequence[int], budget: float = BUDGET_S) -> StepTimes:
    """Time steps of an idle session, for `budget` seconds and one step, which has everything loaded. What there is no
    time for is taken to cost what as many tokens cost elsewhere."""
    most = session.spec.max_batch
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]
    ends = list(dict.fromkeys((rungs[0], rungs[-1])))
    order = list(dict.fromkeys((rungs[0], rungs[len(rungs) // 2], *rungs)))  # time may not last for all
    long = max(SHORT, min(1024, 3 * session.spec.max_seq_len // 4))
    found: dict[tuple[int, int, int], float] = {}
    saved: dict[str, dict[int, float]] = {draft: {} for draft in session.draft_kinds[1:]}
    with _IdleRows(session) as rows:
        rows.add(1, SHORT)
        session.step(rungs[-1])
        begin = time.perf_counter()
        for place, size in enumerate(sizes):
            if place and time.perf_counter() > begin + budget:
                break
            rows.add(size, SHORT)
            session.step(rungs[0])  # the first one touches new rows' caches
            end = begin + budget * (place + 1) / (len(sizes) + 1)
            times, less = _time_steps(session, order, end)
            found |= {(size, rung, SHORT): seconds for rung, seconds in times.items()}
            for draft, seconds in less.items():
                saved[draft][size] = max(times[rungs[0]] - seconds, 0.0)
    with _IdleRows(session) as rows:
        rows.add(1, long)
        times, _ = _time_steps(session, ends, begin + budget)
        found |= {(1, rung, long): seconds for rung, seconds in times.items() if long > SHORT}
    return _fitted(found, rungs, sizes, long, saved)


class _IdleRows:
    """Rows of a session to be timed. They end with their first token, and stand still: a step costs what it costs."""

    def __init__(self, session: Session):
        self.session, self.taken = session, list[int]()

    def add(self, count: int, length: int) -> None:
        """Have so many rows in all; further ones get so many tokens, or as many as an engine takes, of which caches
        hold all but two as they are."""
        spec = self.session.spec
        length = max(min(length, spec.max_seq_len - 3), 2)
        while len(self.taken) < count:
            row = self.session.begin([2] * (length + 1), length + 2, [], {"learning": 0})
            self.taken.append(row)
            self.session.resume(row, length - 1, [])
            self.session.fill(row, spec.prefill_chunk)

    def __enter__(self) -> "_IdleRows":
        return self

    def __exit__(self, *_: object) -> None:
        for row in self.taken:
            self.session.release(row)


def _time_steps(session: Session, rungs: Sequence[int], end: float) -> tuple[dict[int, float], dict[str, float]]:
    """Seconds of the next step of a session by rung, the least of a few, until `end`, the first two at least once; and
    of a step of the first rung by what else may draft."""
    found: dict[int, float] = {}
    less = dict.fromkeys(session.draft_kinds[1:], math.inf)
    for _ in range(ROUNDS):
        for rung in rungs:
            if len(found) > 1 and time.perf_counter() > end:
                return found, less
            found[rung] = min(_seconds_of(session, rung, WHOLE), found.get(rung, math.inf))
            if rung == rungs[0]:
                less = {draft: min(_seconds_of(session, rung, draft), least) for draft, least in less.items()}
    return found, less


def _seconds_of(session: Session, rung: int, draft: str) -> float:
    while True:
        captured, begin = session.captured, time.perf_counter()
        session.step(rung, draft)
        if session.captured == captured:
            return time.perf_counter() - begin


def _fitted(
    found: Mapping[tuple[int, int, int], float],
    rungs: Sequence[int],
    sizes: Sequence[int],
    long: int,
    saved: Mapping[str, Mapping[int, float]],
) -> StepTimes:
    """The table of what was found; for rows of which nothing was, what as many tokens cost: with no time left for 8
    rows, 8 rows of 8 tokens cost what the line says at 64. saved: see `StepTimes`; sizes that are not in it save what
    the last one does."""
    short = {
        (rows, rung): min(  # a step takes no longer than one of as many rows and nodes: then it was disturbed
            other for (r, n, at), other in found.items() if at == SHORT and r >= rows and n >= rung
        )
        for rows, rung, length in found
        if length == SHORT
    }
    tokens = [rows * (1 + rung) for rows, rung in short]
    slope, base = np.polyfit(tokens, [*short.values()], 1) if len(set(tokens)) > 1 else (0.0, short[1, rungs[0]])
    table = {}
    for rows in sizes:
        known = {rung: seconds for (r, rung), seconds in sorted(short.items()) if r == rows}
        known = known or {rung: float(base + slope * rows * (1 + rung)) for rung in (rungs[0], rungs[-1])}
        table[rows] = [max(seconds, short[1, rungs[0]]) for seconds in _hull(rungs, known)]
    first, last = (
        max(found.get((1, rung, long), 0.0) - alone, 0.0) / max(long - SHORT, 1)
        for rung, alone in ((rungs[0], table[1][0]), (rungs[-1], table[1][-1]))
    )
    every = {draft: {rows: of.get(rows, of[max(of)]) for rows in sizes} for draft, of in saved.items()}
    return StepTimes(rungs, table, (first, last), every)


def _hull(rungs: Sequence[int], known: Mapping[int, float]) -> list[float]:
    """Seconds of each rung: the least that a line between two known ones gives, the first among them, past the last one
    the line through the last two. A rung that is taken for too fast is chosen and corrected; one that is taken for too
    slow would stay so."""
    if rungs[-1] not in known:
        (a, b), last = sorted(known)[-2:], rungs[-1]
        slope = max(known[b] - known[a], 0.0) / (b - a)
        known = {**known, last: known[b] + slope * (last - b)}
    lines = [(a, b) for a in known for b in known if a <= b]
    return [
        min(float(np.interp(rung, [a, b], [known[a], known[b]])) for a, b in lines if a <= rung <= b) for rung in rungs
    ]
