"""The parts of `make bench`, one after the other, and what each leaves behind: a table, a JSON and a picture."""

import datetime
import json
import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from specstep.compile.source import load_tokenizer
from specstep.errors import InputError
from specstep.progress import OnProgress

from . import batches, loads
from .engines import CONTENDERS, OUR_WEIGHTS, Contender, Settings, Skip
from .families import family
from .machine import machine, versions
from .page import show
from .pictures import draw_batches, draw_engines, draw_loads, draw_steps
from .questions import OWN, Question, read_questions
from .steps import measure_steps, steps_table
from .summary import SummaryRow, summarize, table
from .turns import ask_in_turns
from .worker import Worker, WorkerFailed

SLOTS = 2048  # of each row, in every engine
SCRATCH = 64  # slots that a draft needs behind the text
QUESTIONS, QUICK_QUESTIONS = 18, 8
RESULTS, PAGE = Path(__file__).parent.parent / "results", "README.md"

Found = tuple[str, dict[str, Any], Callable[[Path], None]]  # the table, the JSON, what draws the picture
Part = Callable[[Namespace, Settings, Sequence[Question], OnProgress], Found | None]


def run(given: Namespace, progress: OnProgress, known: Mapping[str, Part]) -> None:
    """Measure the parts of `known` that were asked for and write what they found. Raises InputError."""
    tokenizer, _ = load_tokenizer(given.model)
    if tokenizer is None:
        raise InputError(f"model: expected one with a tokenizer, got {given.model} without")
    limit = given.lessons + (given.questions or (QUICK_QUESTIONS if given.quick else QUESTIONS))
    most = SLOTS - given.max_new_tokens - SCRATCH
    questions = read_questions(given.prompts or OWN, tokenizer, limit, most, progress)
    lessons, questions = questions[: given.lessons], questions[given.lessons :]
    if given.lessons and not questions:
        raise InputError(f"lessons: expected fewer than the {len(lessons)} questions, got {given.lessons}")
    settings = Settings(
        given.model, given.threads, SLOTS, 1, (tokenizer.eos_token_id,), given.engines,
        tuple(lesson.tokens for lesson in lessons), given.max_new_tokens,
    )  # fmt: skip
    parts = [name for name in known if name in given.only] or [*known][: 1 if given.only else None]
    conditions = _conditions(given, questions)
    for name in parts:
        found = known[name](given, settings, questions, progress)
        if found is not None:
            _write(given, name, conditions, *found)


def engines_part(
    given: Namespace, settings: Settings, questions: Sequence[Question], progress: OnProgress
) -> Found | None:
    """Every engine on single questions."""
    contenders = _chosen(given.only)
    with ExitStack() as stack:
        workers = _start(contenders, settings, stack, progress)
        if not workers:
            return None
        found = ask_in_turns(workers, questions, given.max_new_tokens, given.repeats, progress)
    rows = summarize(contenders, found)
    result = {
        "engines": [{"name": row.name} | asdict(row) for row in rows],
        "answers": [asdict(one) for one in found],
    }
    title = f"{given.model}, {given.threads} threads: tokens per second by engine"
    asked = 1 + max((one.repeat for one in found), default=-1)
    busy = f"Repeats: {asked}. Other work on the machine meanwhile: {_cores(rows)} cores on average.\n"
    return f"{table(rows)}\n{busy}", result, lambda file: draw_engines(file, rows, title)


def batches_part(
    given: Namespace, settings: Settings, questions: Sequence[Question], progress: OnProgress
) -> Found | None:
    """Several rows at once."""
    contenders = [contender for contender in _chosen(given.only) if batches.takes_part(contender)]
    with ExitStack() as stack:
        workers = _start(contenders, replace(settings, rows=batches.ROWS[-1]), stack, progress)
        found = batches.ask_batches(workers, questions, given.max_new_tokens, given.repeats, progress)
    if not found:
        return None
    title = f"{given.model}, {given.threads} threads: tokens per second of all rows together"
    result = {"batches": [asdict(batch) for batch in found]}
    return batches.batches_table(found), result, lambda file: draw_batches(file, found, title)


def steps_part(
    given: Namespace, settings: Settings, questions: Sequence[Question], progress: OnProgress
) -> Found | None:
    """What a step of ours costs."""
    names = [name for name in given.only if name in OUR_WEIGHTS]
    measured = measure_steps(settings, names or [*OUR_WEIGHTS], given.quick, progress)
    title = f"{given.model}, {given.threads} threads: time of a step"
    return steps_table(measured), measured, lambda file: draw_steps(file, measured["steps"], title)


def serve_part(
    given: Namespace, settings: Settings, questions: Sequence[Question], progress: OnProgress
) -> Found | None:
    """Servers with several clients."""
    chosen = [one for one in _chosen(given.only) if given.only or one.name in loads.TAKE_PART]
    settings = replace(settings, rows=loads.CLIENTS[-1])
    ready = _prepared([one for one in chosen if batches.takes_part(one)], settings, progress)
    if not ready:
        return None
    found, alone = loads.measure_loads(ready, settings, questions, given.max_new_tokens, given.repeats, progress)
    title = f"{given.model}, {given.threads} threads: servers under load"
    result = {"loads": [asdict(load) for load in found], "generate_tokens_s": alone}
    return loads.loads_table(found, alone), result, lambda file: draw_loads(file, found, title)


PARTS: dict[str, Part] = {
    "engines": engines_part,
    "batches": batches_part,
    "steps": steps_part,
}


def _chosen(only: Sequence[str]) -> list[Contender]:
    """The engines whose name has one of these in it; all where none is named. Raises InputError."""
    names = [name for name in only if name not in PARTS]
    chosen = [one for one in CONTENDERS if not names or any(name in one.name for name in names)]
    if not chosen:
        known = ", ".join(one.name for one in CONTENDERS)
        raise InputError(f"only: expected {', '.join(PARTS)} or a part of {known}, got {', '.join(names)}")
    return chosen


def _start(contenders: Sequence[Contender], settings: Settings, stack: ExitStack, progress: OnProgress) -> list[Worker]:
    """Prepare and load; what cannot run here is left out with a line."""
    workers = []
    for contender, path in _prepared(contenders, settings, progress):
        progress(f"loading {contender.name}")
        try:
            worker = Worker(contender, path, settings)
        except WorkerFailed as error:
            progress(f"warning: left out: {error}")
            continue
        stack.callback(worker.close)
        workers.append(worker)
    return workers


def _prepared(
    contenders: Sequence[Contender], settings: Settings, progress: OnProgress
) -> list[tuple[Contender, Path]]:
    """What each loads, made where it is not there: all of it, before anything is measured."""
    ready = []
    for contender in contenders:
        module = family(contender.family)
        try:
            module.version()
            ready.append((contender, module.prepare(contender, settings, progress)))
        except Skip as reason:
            progress(f"warning: left out: {contender.name}: {reason}")
    return ready


def _conditions(given: Namespace, questions: Sequence[Question]) -> dict[str, Any]:
    """All that somebody needs to read the numbers."""
    return {
        "date": datetime.date.today().isoformat(),
        "model": given.model,
        "prompts": given.prompts.name if given.prompts else "the bench's own",
        "questions": len(questions),
        "lessons": given.lessons,
        "prompt_tokens": [min(len(q.tokens) for q in questions), max(len(q.tokens) for q in questions)],
        "max_new_tokens": given.max_new_tokens,
        "repeats": given.repeats,
        "threads": given.threads,
        "machine": machine(),
        "versions": versions(CONTENDERS),
    }


def _write(
    given: Namespace,
    name: str,
    conditions: dict[str, Any],
    text: str,
    result: dict[str, Any],
    draw: Callable[[Path], None],
) -> None:
    """NAME.json and NAME.png, and a section of the page; the table is printed, too."""
    given.out.mkdir(parents=True, exist_ok=True)
    whole = json.dumps({"conditions": conditions, **_rounded(result)}, indent=1)
    lines = re.sub(r"\n {3,}|\n {2}(?=[}\]])", " ", whole)  # an entry of a list on one line
    (given.out / f"{name}.json").write_text(lines + "\n")
    picture = given.out / f"{name}.png"
    draw(picture)
    page = given.out.parent / PAGE if given.out == RESULTS else given.out / PAGE
    show(page, name, _in_words(conditions), text, picture)
    print(f"\n{text}\n{_in_words(conditions)}\nwritten: {picture}, {name}.json beside it, {page}", flush=True)


def _in_words(conditions: dict[str, Any]) -> str:
    its, (shortest, longest) = conditions["machine"], conditions["prompt_tokens"]
    found = ", ".join(f"{name} {number}" for name, number in sorted(conditions["versions"].items()))
    return (
        f"{conditions['date']}: {conditions['model']}, {conditions['threads']} threads of {its['cores']} cores "
        f"({its['processor']}; {' '.join(its['instructions'])}), load of other work at the start "
        f"{its['load_at_start'][0]}. {conditions['questions']} questions ({conditions['prompts']}) of {shortest} to "
        f"{longest} tokens, greedy, at most {conditions['max_new_tokens']} new tokens, medians of "
        f"up to {conditions['repeats']} repeats in turn. {found}."
    )


def _cores(rows: Sequence[SummaryRow]) -> str:
    """What other work took from the least and from the most disturbed engine."""
    taken = [row.other_cores for row in rows]
    return f"{min(taken):.2f} to {max(taken):.2f}"


def _rounded(value: Any) -> Any:
    """Numbers with five digits: more is noise."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
