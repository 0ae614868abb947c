"""The generation loop: admit requests to free rows, replay the step, hand out tokens as rows produce them."""

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .session import AcceptedNode, RowReport, Session

Path = tuple[AcceptedNode, ...]  # the drafted tokens that a step accepted

REASONS = {1: "stop", 2: "length"}


@dataclass
class Request:
    """One prompt on its way: what was asked, what came of it so far, and when (seconds of a monotonic clock)."""

    prompt: list[int]
    limit: int
    stop_ids: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    paths: Counter[Path] = field(default_factory=Counter)  # accepted path -> steps
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0

    @property
    def steps(self) -> int:
        """Steps the row took part in."""
        return self.paths.total()

    @property
    def accepted(self) -> Counter[int]:
        """Accepted depth -> steps."""
        depths: Counter[int] = Counter()
        for path, steps in self.paths.items():
            depths[len(path)] += steps
        return depths

    @property
    def stats(self) -> dict[str, Any]:
        """steps, new_tokens, tokens_per_step; accepted, the steps by number of accepted drafted tokens; seconds:
        prefill_s, decode_s from the end of prefill to the last token, time_to_first_token_s from its start."""
        return {
            "steps": self.steps,
            "accepted": {str(depth): steps for depth, steps in sorted(self.accepted.items())},
            "new_tokens": len(self.tokens),
            "tokens_per_step": round(len(self.tokens) / max(self.steps, 1), 3),
            "prefill_s": round(self.prefill_s, 6),
            "decode_s": round(self.decode_s, 6),
            "time_to_first_token_s": round(self.first_token_s, 6),
        }


def run(session: Session, requests: Sequence[Request]) -> Iterator[tuple[Request, list[int]]]:
    """Run requests, as many at once as the engine has rows -> each request with its new tokens, as they come.

    A row that ends is given to the next request at once. Leaving the iterator early frees all rows.
    """
    waiting, rows = deque(requests), dict[int, tuple[Request, float]]()
    try:
        while waiting or rows:
            for row in range(session.spec.max_batch):
                if row not in rows and waiting:
                    rows[row] = _admit(session, row, waiting.popleft())
            for row, report in enumerate(session.step()):
                if row in rows:
                    request, started = rows[row]
                    _advance(request, report, started)
                    if request.finish_reason:
                        session.release(row)
                        del rows[row]
                    yield request, report.tokens
    finally:
        for row in rows:
            session.release(row)


def _admit(session: Session, row: int, request: Request) -> tuple[Request, float]:
    before = time.perf_counter()
    session.admit(row, request.prompt, request.limit, request.stop_ids)
    started = time.perf_counter()
    request.prefill_s = started - before
    return request, started


def _advance(request: Request, report: RowReport, started: float) -> None:
    request.decode_s = time.perf_counter() - started
    if not request.tokens:
        request.first_token_s = request.prefill_s + request.decode_s
    request.tokens += report.tokens
    request.paths[report.path] += 1
    request.finish_reason = REASONS.get(report.finish)
