"""Several rows at once: tokens/s in all, ours against llama.cpp's server with as many slots."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter, sleep

from specstep.progress import OnProgress

from .engines import Contender
from .questions import Question
from .turns import SETTLE_S
from .worker import Worker, WorkerFailed

ROWS = (1, 4, 16)
FAMILIES = ("specstep", "llama.cpp")  # the others decode batches as slowly as their longest answer


@dataclass(frozen=True)
class Batch:
    """tokens_s: of all rows together, prompts included, the median of the repeats."""

    engine: str
    rows: int
    tokens_s: float


def takes_part(contender: Contender) -> bool:
    """Whether an engine is measured with several rows."""
    return contender.family in FAMILIES


def ask_batches(
    workers: Sequence[Worker], questions: Sequence[Question], new_tokens: int, repeats: int, progress: OnProgress
) -> list[Batch]:
    """As many questions at once as there are rows, engine after engine, `repeats` times after a warm-up."""
    alive, found = list(workers), []
    for rows in ROWS:
        prompts = [questions[row % len(questions)].tokens for row in range(rows)]
        speeds: dict[str, list[float]] = {}
        for repeat in range(-1, repeats):
            progress(f"{rows} rows, repeat {repeat + 1} of {repeats}")
            for worker in list(alive):
                sleep(SETTLE_S)
                try:
                    speed = _tokens_s(worker, prompts, new_tokens)
                except WorkerFailed as error:
                    progress(f"warning: left out: {error}")
                    alive.remove(worker)
                    continue
                if repeat >= 0:
                    speeds.setdefault(worker.contender.name, []).append(speed)
        found += [Batch(name, rows, median(taken)) for name, taken in speeds.items()]
    return found


def _tokens_s(worker: Worker, prompts: list[list[int]], new_tokens: int) -> float:
    start = perf_counter()
    texts = worker.answer_all(prompts, new_tokens)
    return sum(map(len, texts)) / (perf_counter() - start)


def batches_table(batches: Sequence[Batch]) -> str:
    """As Markdown: an engine a line, a column for each number of rows."""
    lines = ["| engine | " + " | ".join(f"{rows} row{'s' * (rows > 1)}" for rows in ROWS) + " |", "|---" * 4 + "|"]
    speeds = {(batch.engine, batch.rows): batch.tokens_s for batch in batches}
    for engine in dict.fromkeys(batch.engine for batch in batches):
        cells = (f"{speeds[engine, rows]:.0f}" if (engine, rows) in speeds else "" for rows in ROWS)
        lines.append(f"| {engine} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
