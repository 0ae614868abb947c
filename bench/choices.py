"""Choices of nodes over a record of answers: what `bench_choice.py` records, and how steps are simulated over it."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench_ladder import groups
from contender import Contender
from specstep.report import NOTHING, RUNNING, WHOLE, AcceptedNode, DraftedTree, RowReport
from specstep.runtime.ladder.ladder import Chosen, Ladder, rungs_up_to
from specstep.runtime.ladder.measure_steps import measure
from specstep.runtime.ladder.row_drafts import RowDrafts
from specstep.runtime.ladder.step_times import StepTimes
from specstep.runtime.session import Session

NEW_TOKENS = 64  # of an answer
SECONDS = 30.0  # in which steps are timed
NOISE = 0.1  # by which what a step takes varies
Answer = dict[str, Any]  # group, temperature; by what drafts, path and scores at each place


class Walk(Ladder):
    """Verifies nothing, so that there is a step at each place of an answer, and notes what each could have verified."""

    def __init__(self, session: Session, draft: str):
        super().__init__([0])
        self._session, self._draft = session, draft
        self.trees: list[DraftedTree | None] = []
        self.scores: list[list[int]] = [[]]
        self.text: list[int] = []

    def choose(self, rows: int, drafts: Sequence[RowDrafts], length: float, ahead: bool = False) -> Chosen:
        """At the only row."""
        self.trees.append(None if drafts[0].drafted == NOTHING else self._session.tree(0))
        return Chosen(0, self._draft)

    def learn(self, drafts: RowDrafts, report: RowReport, drafted: str) -> None:
        super().learn(drafts, report, drafted)
        self.text += report.tokens
        self.scores.append(report.scores)

    @property
    def places(self) -> list[tuple[list[int], list[int]]]:
        """Of each place of the answer, the path that a step of all nodes accepts, and the scores of the nodes."""
        paths = [path_of(tree, self.text[at:]) for at, tree in enumerate(self.trees)]
        return list(zip(paths, self.scores, strict=False))


def path_of(tree: DraftedTree | None, text: Sequence[int]) -> list[int]:
    """The nodes of a tree, the first one 0, that the text below its root follows."""
    path, node = [], 0
    for token in text if tree is not None else ():
        below = [at for at, parent in enumerate(tree.parents) if parent == node and tree.tokens[at] == token]
        if not below:
            break
        node = below[0]
        path.append(node - 1)
    return path


def record(engine: str, questions: Path, progress: Callable[[str], None]) -> dict[str, Any]:
    """Answers at one row, drafted for at each place, once by all and once by what is cheap; and what steps take."""
    contender = Contender(engine, "all", progress)
    session = contender.engine.session
    progress("timing steps")
    times = measure(session, rungs_up_to(session.spec.nodes), SECONDS)
    answers = []
    for group, asked in groups(questions, 1).items():
        for place, (prompt, sampling) in enumerate(asked):
            progress(f"{group} {place + 1}")
            answer: Answer = {"group": group, "temperature": sampling.get("temperature", 0.0)}
            for draft in (draft for draft in session.draft_kinds if draft != NOTHING):
                walk = Walk(session, draft)
                answering = contender.answers([(prompt, sampling)], 1, NEW_TOKENS, walk)
                while answering.step():
                    pass
                answer[draft] = walk.places
            answers.append(answer)
    return {"times": times.to_dict(), "answers": answers}


class Fixed(Ladder):
    """A number of nodes, always drafted by the same."""

    def __init__(self, nodes: int, draft: str):
        super().__init__([nodes])
        self._draft = draft

    def choose(self, rows: int, drafts: Sequence[RowDrafts], length: float, ahead: bool = False) -> Chosen:
        drafted = any(each.drafted != NOTHING for each in drafts)
        return Chosen(self.rungs[0] if drafted else 0, self._draft)


def simulate(
    ladder: Ladder, answers: Sequence[Answer], rows: int, times: StepTimes
) -> tuple[float, Counter[tuple[int, str]]]:
    """Have rows answer until one is free for which no answer waits -> tokens per second, and the steps by their nodes
    and what drafted. times: what steps take; the ladder sees them vary."""
    chance, waiting, running, steps = random.Random(0), [*answers], list[list[Any]](), Counter[tuple[int, str]]()
    tokens, seconds = 0, 0.0
    while True:
        while waiting and len(running) < rows:
            answer = waiting.pop(0)
            running.append([answer, 0, ladder.row(answer["temperature"])])
        if len(running) < rows:
            return tokens / seconds, steps
        nodes, draft = ladder.choose(rows, [row for _, _, row in running], 0.0)
        took = times.seconds(rows, 0.0, draft)[times.rungs.index(nodes)]
        seconds += took
        steps[nodes, draft] += 1
        ladder.timed(rows, nodes, draft, 0.0, took * chance.uniform(1 - NOISE, 1 + NOISE))
        for each in running:
            moved = advance(ladder, *each, nodes, draft)
            each[1] += moved
            tokens += moved
        running = [each for each in running if each[1] < NEW_TOKENS]


def advance(ladder: Ladder, answer: Answer, at: int, row: RowDrafts, nodes: int, draft: str) -> int:
    """Have a row make a step at a place of its answer -> its tokens."""
    path = answer[row.drafted][at][0] if row.drafted != NOTHING else []
    kept = next((depth for depth, node in enumerate(path) if node >= nodes), len(path))
    count = min(1 + kept, NEW_TOKENS - at)
    missed = path[kept] + 1 if kept < len(path) and count == 1 + kept else 0
    known = draft != NOTHING and at + count < NEW_TOKENS
    scores = answer[draft][at + count][1] if known else []
    accepted = tuple(AcceptedNode(node + 1, 0) for node in path[: count - 1])
    ladder.learn(row, RowReport([0] * count, RUNNING, accepted, missed, scores, []), draft)
    return count


class Compared(NamedTuple):
    """Tokens per second of a group: as chosen, with the steps by nodes and what drafted; and of each fixed number."""

    chosen: float
    steps: Counter[tuple[int, str]]
    fixed: dict[int, float]


def compare(recorded: Mapping[str, Any], rows: int) -> dict[str, Compared]:
    """Each group of answers, in so many rows. The ladder goes through all groups once before, as in use."""
    times, by_group = StepTimes.from_dict(recorded["times"]), defaultdict(list)
    for answer in recorded["answers"]:
        by_group[answer["group"]].append(answer)
    ladder, found = Ladder(times.rungs, StepTimes.from_dict(recorded["times"])), {}
    several = {group: answers * rows for group, answers in by_group.items()}  # rows side by side have others
    for answers in several.values():
        simulate(ladder, answers, rows, times)
    for group, answers in several.items():
        speed, steps = simulate(ladder, answers, rows, times)
        fixed = [Fixed(0, times.draft_kinds[-1]), *(Fixed(nodes, WHOLE) for nodes in times.rungs[1:])]
        speeds = {other.rungs[0]: simulate(other, answers, rows, times)[0] for other in fixed}
        found[group] = Compared(speed, steps, speeds)
    return found
