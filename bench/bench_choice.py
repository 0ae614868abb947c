"""Whether the choice of nodes is good, apart from the machine's noise: steps are simulated over one record.

    python bench/bench_choice.py engines/smol                     # record, a few minutes, then simulate
    python bench/bench_choice.py --record record.json             # simulate again, after a change of the ladder

The record has what a step would accept at each place of each answer, with trees of all that drafts and of what is
cheap, and how long steps take. So text, time and order are the same for every choice. Left out are prompts, what a
choice costs itself, and that a head which paused drafts a little worse at first; see bench_ladder.py.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from script import run_script, write_json

QUESTIONS = Path(__file__).parent / "side_by_side" / "questions.jsonl"


def table(recorded: Mapping[str, Any], rows: int) -> str:
    """A line for each group: tokens per second as chosen, over the best fixed number, and how many steps had how many
    nodes."""
    from choices import compare

    lines, ratios = [f"{rows} rows         chosen    /best fixed   steps by nodes"], []
    for group, found in compare(recorded, rows).items():
        best = max(found.fixed, key=lambda nodes: found.fixed[nodes])
        ratios.append(found.chosen / found.fixed[best])
        steps = " ".join(f"{nodes} {draft}: {count}" for (nodes, draft), count in sorted(found.steps.items()))
        lines.append(f"{group:12} {found.chosen:8.1f}  {ratios[-1]:6.3f} ({best:>2})   {steps}")
    return "\n".join([*lines, f"{'mean':12}           {geometric_mean(ratios):6.3f}\n"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Record and simulate -> exit status, see `run_script`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", metavar="DIR", nargs="?", help="an engine to record")
    parser.add_argument("--record", type=Path, default=Path("record.json"), help="where the record is, or is written")
    parser.add_argument("--rows", default="1,2,4,8", help="answers at a time, as many as the engine has rows at most")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args(arguments)

    def run(progress: Callable[[str], None]) -> None:
        if given.engine:
            from choices import record

            write_json(given.record, record(given.engine, QUESTIONS, progress))
        recorded = json.loads(given.record.read_text())
        for rows in map(int, given.rows.split(",")):
            print(table(recorded, rows), flush=True)

    return run_script("bench_choice", given.threads, run)


if __name__ == "__main__":
    raise SystemExit(main())
