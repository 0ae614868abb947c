"""Choices of nodes over a record of steps: what `bench_choice.py` records, and how it is gone through."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_ladder import groups
from contender import Contender
from specstep.report import RUNNING, AcceptedNode, RowReport
from specstep.runtime.ladder import Ladder, RowDrafts, rungs_up_to
from specstep.runtime.measure_steps import measure
from specstep.runtime.session import CHEAP, NOTHING
from specstep.runtime.step_times import StepTimes


class Noting(Ladder):
    """A fixed number of nodes that notes what its last step was."""

    def timed(self, rows: int, rung: int, drafted: str, length: float, seconds: float) -> None:
        self.length, self.seconds = length, seconds

    def learn(self, drafts: RowDrafts, report: RowReport, drafted: str) -> None:
        self.new, self.path = drafts.drafted == NOTHING, [accepted.node - 1 for accepted in report.path]
        super().learn(drafts, report, drafted)


def record(engine: str, questions: Path, seconds: float, report: Callable[[str], None]) -> dict[str, Any]:
    """Turns of all fixed numbers of nodes for so many seconds, and the measured times of their steps. Of a turn: group,
    temperature, whether its row is new, length, the path that all nodes accepted, seconds by nodes."""
    first = Contender(engine, "all", report)
    rungs = rungs_up_to(first.engine.spec.nodes)
    times = measure(first.engine.session, rungs)
    contenders = {rungs[-1]: first} | {rung: Contender(engine, rung, report) for rung in rungs[:-1]}
    for rung, contender in contenders.items():
        contender.ladder = Noting(sorted({0, rung}))
    turns, end, order = [], time.perf_counter() + seconds, random.Random(0)
    while time.perf_counter() < end:
        for group, asked in groups(questions, 1).items():
            report(f"recording {group}")
            for prompt, sampling in asked:
                answers = {rung: each.answers([(prompt, sampling)], 1, 64) for rung, each in contenders.items()}
                while all(answers[rung].step() for rung in order.sample(rungs, len(rungs))):
                    noted = {rung: each.ladder for rung, each in contenders.items()}
                    last = noted[rungs[-1]]
                    turns.append(
                        {"group": group, "temperature": sampling.get("temperature", 0.0), "new": last.new}
                        | {"length": last.length, "path": last.path}
                        | {"seconds": [each.seconds for _, each in sorted(noted.items())]}
                    )
                for each in answers.values():
                    each.end()
    known = times.to_dict()
    known["saved"].pop(CHEAP, None)  # nothing is recorded of it
    return {"rungs": rungs, "times": known, "turns": turns}


def steps(recorded: Mapping[str, Any]) -> Iterator[tuple[str, int, int, float]]:
    """Choose at each turn -> group, nodes, tokens and seconds of the step."""
    rungs, times = recorded["rungs"], StepTimes.from_dict(recorded["times"])
    ladder = Ladder(rungs, times)
    row = ladder.row()
    for turn in recorded["turns"]:
        if turn["new"]:
            row = ladder.row(turn["temperature"])
        nodes, draft = ladder.choose(1, [row], turn["length"])
        path = turn["path"] if row.drafted != NOTHING else []
        kept = accepted(path, nodes)
        seconds = turn["seconds"][rungs.index(nodes)]
        if nodes == 0 and draft != NOTHING:  # recorded were steps that draft nothing
            seconds += times.saved.get(NOTHING, {1: 0.0})[1]
        ladder.timed(1, nodes, draft, turn["length"], seconds)
        missed = path[kept] + 1 if kept < len(path) else 0
        report = RowReport([0] * (1 + kept), RUNNING, tuple(AcceptedNode(at + 1, 0) for at in path[:kept]), missed, [])
        ladder.learn(row, report, draft)
        yield turn["group"], nodes, 1 + kept, seconds


def accepted(path: Sequence[int], nodes: int) -> int:
    """How many nodes of a path are accepted where only the first `nodes` of the tree are verified."""
    return next((at for at, place in enumerate(path) if place >= nodes), len(path))
