"""Engines that answer the same prompts turn by turn, one after the other: so a busy moment is the same for all."""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from specstep.runtime.asked.request import Request
from specstep.runtime.engine import Engine
from specstep.runtime.ladder.ladder import Ladder, make_ladder
from specstep.runtime.open_directory import open_directory
from specstep.runtime.rows import Rows, TakenRequest
from specstep.runtime.session import Session
from specstep.runtime.submission import Caller, Submission

STEPS = 8  # of a turn: in the first one caches are full of the others' weights, and what is run by few is slower
AskedPrompts = Sequence[tuple[str, dict[str, float]]]  # prompts, each with its sampling


class Contender:
    """An engine that is opened once, with its own session and what it knows of its steps."""

    def __init__(self, directory: str, nodes: int | str, progress: Callable[[str], None]):
        """nodes: as for `specstep.load`."""
        opened = open_directory(Path(directory), False, None, progress)
        self._ladder = make_ladder(opened.session, nodes, opened.identity, progress)
        self.engine = Engine(opened.session, opened.text, learning=False, ladder=self._ladder)

    def answers(self, asked: AskedPrompts, rows: int, most: int, ladder: Ladder | None = None) -> "Answers":
        """What is to be done: prompts, how many at a time, the tokens of each answer. ladder: in place of its own."""
        chat = self.engine.has_chat_template
        requests = [
            self.engine.request(prompt, most, chat=chat, sampling=sampling, ignore_eos=True)
            for prompt, sampling in asked
        ]
        return Answers(self.engine.session, requests, rows, ladder or self._ladder)


class Answers:
    """Requests that a contender answers: what the scheduler's worker does with them, in this thread. It is over once a
    row is free for which no request waits: a batch that empties is one of fewer rows, and would be measured by its
    slowest answers. tokens: of all answers so far."""

    def __init__(self, session: Session, requests: Sequence[Request], most: int, ladder: Ladder):
        """most: rows that answer at a time. ladder: says how many nodes a step verifies."""
        self._rows, self._most = Rows(session, session.spec.prefill_chunk, None, ladder), most
        self._caller, self._waiting, self.tokens = Caller(requests), deque(requests), 0
        self._told = Submission(self._caller, requests)

    def step(self) -> bool:
        """Prefill, and step once -> whether it goes on. Raises what a prefill or a step raised."""
        self._rows.prefill(self._take_next)
        self._rows.step(awaited=False)
        try:
            while told := self._told.poll():
                self.tokens += len(told[1])
        except StopIteration:  # all have ended
            return False
        if self._waiting or len(self._rows.taken) == self._most:
            return True
        self.end()
        return False

    def end(self) -> None:
        """Free the rows of answers that still run."""
        self._told.cancel()
        self._rows.release_ended()

    def _take_next(self) -> TakenRequest | None:
        if not self._waiting or len(self._rows.running) == self._most:
            return None
        return self._rows.take(self._caller, self._waiting.popleft())


def seconds_of_each(answers: dict[str, Answers], order: random.Random) -> dict[str, float]:
    """Have all answer, in turns of STEPS steps -> the seconds that each took."""
    seconds, left = dict.fromkeys(answers, 0.0), list(answers)
    while left:
        for name in order.sample(left, len(left)):
            begin = time.perf_counter()
            more = all(answers[name].step() for _ in range(STEPS))
            seconds[name] += time.perf_counter() - begin
            if not more:
                left.remove(name)
    return seconds
