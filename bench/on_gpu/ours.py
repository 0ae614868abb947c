"""Steps of an engine under forced acceptance: whole, without the head, and the host's share of them."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import specstep
from specstep.report import CHEAP
from specstep.runtime.session import Session

from .clock import Deadline, median_ms, programs_timed, wait, wall_s

TOKENS = (1, 2, 3, 4)  # that a step brings, the last one the target's own
FORCED = TOKENS[-1] - 1  # drafts that every step accepts
WARM, LIVE = 3, 4  # steps that are not timed; and those in which tokens are counted
PAIRS = 2  # warm-up of steps in turn with and without a draft


class Rows:
    """Rows of a session with so many tokens in their caches, which random numbers stand for."""

    def __init__(self, session: Session, count: int, tokens: int, room: int):
        """room: new tokens after which a row ends. Then it stands still, and costs what it cost."""
        self.session, self.taken = session, list[int]()
        spec = session.spec
        for _ in range(count):
            row = session.begin([2] * (tokens + 1), tokens + 1 + room, [])
            self.taken.append(row)
            session.resume(row, tokens - 1, [])
            session.fill(row, spec.prefill_chunk)
        for cache in session.caches.values():
            cache[:count, :, :tokens].normal_()

    def __enter__(self) -> "Rows":
        return self

    def __exit__(self, *_: object) -> None:
        for row in self.taken:
            self.session.release(row)


def build_engine(model: Path, head: Path, folder: Path, **options: Any) -> Path:
    """An engine that accepts FORCED drafts in every step."""
    return specstep.build(str(model), folder, drafter=str(head), forced_acceptance=FORCED, **options)


def measure_engine(
    folder: Path, batches: Sequence[int], lengths: Sequence[int], steps: int, deadline: Deadline
) -> Iterator[dict[str, Any]]:
    """One figure after the other: a dict for each number of rows and of tokens in their caches."""
    with specstep.load(folder, nodes="all", learning=False) as engine:
        for tokens in lengths:
            for batch in batches:
                if deadline.passed():
                    return
                yield {"batch": batch, "cache": tokens} | measure_cell(engine.session, batch, tokens, steps)


def measure_cell(session: Session, batch: int, tokens: int, steps: int) -> dict[str, float]:
    """Medians over so many steps. step_ms: a whole step; verify_ms: one that leaves the head out; draft_share: what
    that saves of a step; device_ms: the device's own work in a whole step; host_us: what the call takes beside it;
    tokens_per_step: of one row, as reported."""
    with Rows(session, batch, tokens, room=(WARM + LIVE + 1) * (FORCED + 1)):
        for _ in range(WARM):
            session.step()
        brought = [len(told.tokens) for _ in range(LIVE) for told in session.step().values()]
    with Rows(session, batch, tokens, room=1):
        whole = _times(session, WARM + steps)[WARM:]
        verify = _times_without_head(session, PAIRS + steps)[PAIRS:]
        with programs_timed(session) as programs:
            beside = _times(session, steps)
        wait(session.spec.device)
    if len(programs) != steps:
        raise RuntimeError(f"steps: expected {steps} that the device was timed in, got {len(programs)}")
    step_ms, verify_ms, device_ms = median_ms(whole), median_ms(verify), median_ms(programs)
    # On a GPU the clock of a program delays its step; on a CPU the same steps tell both, whatever else is running.
    called_ms = step_ms if session.spec.device == "cuda" else median_ms(beside)
    return {
        "step_ms": step_ms,
        "verify_ms": verify_ms,
        "draft_share": 1 - verify_ms / step_ms,
        "device_ms": device_ms,
        "host_us": (called_ms - device_ms) * 1e3,
        "tokens_per_step": statistics.mean(brought),
    }


def _times(session: Session, steps: int) -> list[float]:
    return [wall_s(session.step) for _ in range(steps)]


def _times_without_head(session: Session, steps: int) -> list[float]:
    """Of steps that leave the head out, each after one that drafted what it verifies."""
    taken = []
    for _ in range(steps):
        session.step()
        taken.append(wall_s(lambda: session.step(draft=CHEAP)))
    return taken


def tokens_per_second(cell: dict[str, Any]) -> dict[int, float]:
    """Tokens a second of all rows, by how many a step brings to each. A step does the same work for any of them."""
    return {tokens: cell["batch"] * tokens / cell["step_ms"] * 1e3 for tokens in TOKENS}
