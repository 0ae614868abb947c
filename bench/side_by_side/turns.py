"""Engines in turns: each question goes to one engine after the other, so that a busy moment hits all alike."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from specstep.progress import OnProgress

from .engines import Answer
from .other_work import OtherWork
from .questions import Question
from .worker import Worker, WorkerFailed

SETTLE_S = 0.05  # threads of the engine before spin for a while: they must be asleep when the next one starts


@dataclass(frozen=True)
class Measured:
    """One answer. seconds: of the whole call, prompt included. text: a digest of its tokens. other_cores: cores that
    other work took meanwhile."""

    engine: str
    question: str
    category: str
    repeat: int
    prompt_tokens: int
    new_tokens: int
    decoded: int
    prompt_s: float
    decode_s: float
    seconds: float
    steps: int | None
    text: str
    other_cores: float


def ask_in_turns(
    workers: Sequence[Worker], questions: Sequence[Question], new_tokens: int, repeats: int, progress: OnProgress
) -> list[Measured]:
    """Every question to every engine, `repeats` times, after one that does not count. An engine that fails is left out
    from there on, with a line; the order is another for each question. An interrupt ends it with what it has."""
    alive: list[Worker] = list(workers)
    found: list[Measured] = []
    for worker in workers:
        progress(f"warming up {worker.contender.name}")
        _ask(worker, questions[0], new_tokens, -1, alive, progress)
    started, rounds = (
        time.monotonic(),
        [(repeat, index) for repeat in range(repeats) for index in range(len(questions))],
    )
    try:
        for done, (repeat, index) in enumerate(rounds, 1):
            found += _round(questions[index], repeat, index + repeat, new_tokens, alive, progress)
            left = (time.monotonic() - started) / done * (len(rounds) - done)
            progress(f"repeat {repeat + 1} of {repeats}, question {index + 1} of {len(questions)}, {left:.0f} s to go")
    except KeyboardInterrupt:
        progress(f"warning: interrupted: {len(found)} answers count, of whole rounds")
    return [one for one in found if one.engine in {worker.contender.name for worker in alive}]


def _round(
    question: Question, repeat: int, turn: int, new_tokens: int, alive: list[Worker], progress: OnProgress
) -> list[Measured]:
    """One question to all engines."""
    first, answers = turn % max(len(alive), 1), []
    for worker in [*alive[first:], *alive[:first]]:
        time.sleep(SETTLE_S)
        answers.append(_ask(worker, question, new_tokens, repeat, alive, progress))
    return [answer for answer in answers if answer is not None]


def _ask(
    worker: Worker, question: Question, new_tokens: int, repeat: int, alive: list[Worker], progress: OnProgress
) -> Measured | None:
    others, start = OtherWork(worker.pid), time.perf_counter()
    try:
        answer = worker.answer(question.tokens, new_tokens)
    except WorkerFailed as error:
        progress(f"warning: left out: {error}")
        alive.remove(worker)
        return None
    return _measured(worker.contender.name, question, repeat, answer, time.perf_counter() - start, others.cores())


def _measured(
    engine: str, question: Question, repeat: int, answer: Answer, seconds: float, other_cores: float
) -> Measured:
    text = hashlib.sha256(str(answer.tokens).encode()).hexdigest()[:12]
    return Measured(
        engine, question.id, question.category, repeat, len(question.tokens), len(answer.tokens), answer.decoded,
        answer.prompt_s, answer.decode_s, seconds, answer.steps, text, other_cores,
    )  # fmt: skip
