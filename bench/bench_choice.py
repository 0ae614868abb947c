"""Whether the choice of nodes is good, apart from the machine's noise: every choice is made over one record.

    python bench/bench_choice.py engines/smol                     # record for two minutes, then choose over the record
    python bench/bench_choice.py --record record.json             # choose again, after a change of runtime/ladder.py

The record has, turn by turn, how long a step of each fixed number of nodes took, one right after the other, and which
nodes the step of all nodes accepted: of fewer nodes, those of its path that are among them. One row at a time; drafts
without the head are not in it. What a choice itself costs is not in the figures, see bench_ladder.py.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from script import run_script, write_json

QUESTIONS = Path(__file__).parent / "side_by_side" / "questions.jsonl"


def table(recorded: Mapping[str, Any]) -> str:
    """A line for each group: tokens per second as chosen and of the fixed number that is best in hindsight, and how
    many steps had how many nodes."""
    from choices import accepted, steps

    spent: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    nodes_of: dict[str, Counter[int]] = defaultdict(Counter)
    for group, nodes, tokens, seconds in steps(recorded):
        add(spent[group]["auto"], tokens, seconds)
        nodes_of[group][nodes] += 1
    for turn in recorded["turns"]:
        for rung, seconds in zip(recorded["rungs"], turn["seconds"], strict=True):
            add(spent[turn["group"]][str(rung)], 1 + accepted(turn["path"], rung), seconds)
    lines, ratios = ["               chosen    best fixed   steps by nodes"], []
    for group, of in spent.items():
        speed = {name: tokens / seconds for name, (tokens, seconds) in of.items()}
        best = max((name for name in speed if name != "auto"), key=lambda name: speed[name])
        ratios.append(speed["auto"] / speed[best])
        counts = " ".join(f"{nodes}: {count}" for nodes, count in sorted(nodes_of[group].items()))
        lines.append(f"{group:12} {speed['auto']:8.1f}  {ratios[-1]:6.3f} ({best:>2})   {counts}")
    return "\n".join([*lines, f"{'mean':12}           {geometric_mean(ratios):6.3f}"])


def add(total: list[float], tokens: int, seconds: float) -> None:
    """Add to tokens and seconds."""
    total[0] += tokens
    total[1] += seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Record and choose -> exit status, see `run_script`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", metavar="DIR", nargs="?", help="an engine to record")
    parser.add_argument("--record", type=Path, default=Path("record.json"), help="where the record is, or is written")
    parser.add_argument("--seconds", type=float, default=120, help="of recording")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args(arguments)

    def run(report: Callable[[str], None]) -> None:
        if given.engine:
            from choices import record

            write_json(given.record, record(given.engine, QUESTIONS, given.seconds, report))
        print(table(json.loads(given.record.read_text())))

    return run_script("bench_choice", given.threads, run)


if __name__ == "__main__":
    raise SystemExit(main())
