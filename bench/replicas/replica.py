"""One replica as the scheduler runs it: rows that step together, prompts in parts between steps, and what is kept."""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from .speed import Speed

PER_STEP = 64  # prompt tokens that are prefilled between two steps, as `--prefill-per-step`
CHUNK_S = 0.04  # least time from one chunk of a stream to the next, as `--stream-interval-ms`
BLOCK = 32  # tokens of a block of the prefix cache


@dataclass
class Call:
    """A turn of a conversation. prompt: tokens; left: those to prefill, then those to write. tokens: in its row."""

    conversation: int
    prompt: int
    answer: int
    asked: float
    turn: int = 0
    left: float = 0.0
    tokens: float = 0.0
    first: float | None = None  # when its first tokens came


class Replica:
    """Time runs from one `advance` to the next; a stretch of equal steps is one of them."""

    def __init__(self, speed: Speed, rows: int, most_kept: float):
        """most_kept: tokens that the prefix cache holds."""
        self._speed, self._rows, self._most = speed, rows, most_kept
        self.kept: OrderedDict[int, int] = OrderedDict()  # tokens by conversation, the least recently used first
        self._sum = 0  # of them
        self.waiting: deque[Call] = deque()
        self.running: list[Call] = []
        self.filling: Call | None = None
        self.until = math.inf  # when the stretch under way ends
        self.stretch = 0  # its number: what was planned for another is void
        self._begun, self._step, self._brings, self._stepped = 0.0, 0.0, 0.0, 0
        self.chunks = 0.0  # that streams were sent
        self.answers = 0
        self.asked = self.prefilled = self.written = 0.0  # tokens

    @property
    def outstanding(self) -> int:
        """Calls that wait or run."""
        return len(self.waiting) + len(self.running) + (self.filling is not None)

    def submit(self, call: Call, now: float) -> None:
        """A call arrives. The step under way ends, and the stretch with it."""
        self.waiting.append(call)
        if self.until == math.inf:
            self._plan(now)
        elif self.filling is None and self._room():
            steps = max(1, math.ceil((now - self._begun) / self._step))
            self.until = min(self.until, self._begun + steps * self._step)
            self.stretch += 1

    def advance(self) -> list[Call]:
        """End the stretch -> the calls that are done."""
        now, begun = self.until, self._begun
        if self.filling is not None and self.filling.left <= 0:
            call, self.filling = self.filling, None
            call.left = call.answer
            self.running.append(call)
        steps = round((now - begun) / self._step) if self._step else 0
        done = self._write(now, steps)
        self._plan(now)
        return done

    def _write(self, now: float, steps: int) -> list[Call]:
        """What so many steps bring to those that run -> those that are done."""
        stepped = self.running[: self._stepped]
        brought, interval = steps * self._brings, self._step
        self.chunks += len(stepped) * min(steps, steps * interval / CHUNK_S)
        for call in stepped:
            got = min(brought, call.left)
            call.left -= got
            call.tokens += got
            self.written += got
            if call.first is None and got:
                call.first = now - (steps - 1) * interval
        done = [call for call in stepped if call.left <= 1e-9]
        self.running = [call for call in self.running if call.left > 1e-9]
        self.answers += len(done)
        for call in done:
            self._keep(call)
        return done

    def _plan(self, now: float) -> None:
        """Begin the next stretch: a part of a prompt and a step, or steps until the first row is done."""
        if self.filling is None and self._room() and self.waiting:
            self._admit(self.waiting.popleft())
        self._begun, self._stepped, self._step, self._brings = now, len(self.running), 0.0, 0.0
        spent = 0.0
        if self.filling is not None:
            part = min(self.filling.left, PER_STEP if self.running else 4 * PER_STEP)
            self.filling.left -= part
            self.prefilled += part
            spent = part / self._speed.prompt_s
        if self.running:
            self._step, self._brings = self._speed.step(len(self.running), sum(call.tokens for call in self.running))
        steps = 0
        if self.running:
            least = min(call.left for call in self.running)
            fresh = any(call.first is None for call in self.running)
            steps = 1 if self.filling is not None or fresh else max(1, math.ceil(least / self._brings - 1e-9))
        self._begun += spent
        self.until = self._begun + steps * self._step if spent or steps else math.inf
        self.stretch += 1

    def _room(self) -> bool:
        return len(self.running) + (self.filling is not None) < self._rows

    def _admit(self, call: Call) -> None:
        """Give a call a row, with what is kept of its prompt."""
        known = min(self.kept.get(call.conversation, 0), call.prompt - 1) // BLOCK * BLOCK
        if call.conversation in self.kept:
            self.kept.move_to_end(call.conversation)
        self.asked += call.prompt
        call.left, call.tokens = float(max(call.prompt - 1 - known, 1)), float(call.prompt)
        self.filling = call

    def _keep(self, call: Call) -> None:
        """Keep what a row has; the least recently used make room."""
        tokens = call.prompt + call.answer
        self._sum += tokens - self.kept.pop(call.conversation, 0)
        self.kept[call.conversation] = tokens
        while self._sum > self._most:
            oldest = next(iter(self.kept))
            gone = min(self.kept[oldest], self._sum - int(self._most))
            self._sum -= gone
            self.kept[oldest] -= gone
            if not self.kept[oldest]:
                del self.kept[oldest]
