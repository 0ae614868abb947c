"""Whether `--nodes auto` finds the best number of nodes: beside every fixed number, by rows and kind of text.

    python bench/bench_ladder.py engines/smol                      # an engine with 16 rows shows most
    python bench/bench_ladder.py engines/smol --plain engines/plain --rows 1,8 --prompts FILE.jsonl

All answer the same prompts: greedy ones of each category, hopeless ones (sampled at a temperature of 2, where next to
no draft hits), and both mixed. They take turns, a few steps and the prompts ahead of them, in another order each time:
a busy moment is the same for all. Tokens and time count while all rows are taken. The best fixed number is the one that
was best in the other repeats: the best of several noisy figures would flatter itself. --plain: an engine of the same
model without a drafter.
bench/results/ladder.json has all figures.
"""

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean, median

from script import run_script, write_json

BENCH = Path(__file__).parent
RUNGS = (0, 1, 2, 3, 5, 7)
HOPELESS = {"temperature": 2.0}
PROMPTS = 4  # at least, of a group
FOR_A_ROW = 2  # of them, so that rows are free again and again
Figures = dict[str, dict[str, list[float]]]  # group of prompts -> contender -> tokens per second of each repeat


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", metavar="DIR")
    parser.add_argument("--plain", metavar="DIR", help="an engine without a drafter")
    parser.add_argument("--prompts", type=Path, default=BENCH / "side_by_side" / "questions.jsonl")
    parser.add_argument("--rows", default="1,2,4,8,16", help="prompts at a time")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="2 or more")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=BENCH / "results" / "ladder.json")
    given = parser.parse_args(arguments)
    if given.repeats < 2:
        parser.error(f"--repeats: expected 2 or more, got {given.repeats}")
    return given


def groups(file: Path, rows: int) -> dict[str, list[tuple[str, dict[str, float]]]]:
    """Prompts with their sampling, FOR_A_ROW for each row, of each category, hopeless ones, and a mix; no fewer than
    PROMPTS, for a number of nodes may happen to fit a single one. Prompts come again where there are fewer."""
    prompts = defaultdict(list)
    for line in file.read_text().splitlines():
        entry = json.loads(line)
        prompts[entry["category"]].append(entry.get("prompt") or entry["turns"][0])
    every = [prompt for several in prompts.values() for prompt in several]

    def some(of: Sequence[str], sampling: Callable[[int], dict[str, float]]) -> list[tuple[str, dict[str, float]]]:
        return [(of[place % len(of)], sampling(place)) for place in range(max(FOR_A_ROW * rows, PROMPTS))]

    found = {category: some(several, lambda _: {}) for category, several in prompts.items()}
    found["hopeless"] = some(every, lambda place: HOPELESS | {"seed": place})
    return found | {"mixed": some(every, lambda place: HOPELESS | {"seed": place} if place % 2 else {})}


def measure(given: argparse.Namespace, progress: Callable[[str], None]) -> Iterator[tuple[int, Figures]]:
    """Rows and their figures, as they come."""
    from contender import Contender, seconds_of_each

    contenders = {"auto": Contender(given.engine, "auto", progress)}
    nodes = contenders["auto"].engine.spec.nodes
    rungs = [*(rung for rung in RUNGS if rung < nodes), nodes]
    contenders |= {str(rung): Contender(given.engine, rung, progress) for rung in rungs}
    if given.plain:
        contenders["plain"] = Contender(given.plain, "all", progress)
    order = random.Random(0)
    for rows in map(int, given.rows.split(",")):
        figures: Figures = defaultdict(lambda: defaultdict(list))
        for repeat in range(-1, given.repeats):  # the first one warms up
            for group, asked in groups(given.prompts, rows).items():
                progress(f"{rows} rows, {group}")
                answers = {name: each.answers(asked, rows, given.max_new_tokens) for name, each in contenders.items()}
                for name, seconds in seconds_of_each(answers, order).items():
                    if repeat >= 0:
                        figures[group][name].append(answers[name].tokens / seconds)
        print(table(rows, figures), flush=True)
        yield rows, figures


def best_fixed(of: dict[str, list[float]]) -> tuple[list[str], list[float]]:
    """The fixed numbers that were best in all other repeats, one for each repeat, and their speed in it."""
    fixed = {name: speeds for name, speeds in of.items() if name not in ("auto", "plain")}
    names = [max(fixed, key=lambda name: sum(fixed[name]) - fixed[name][repeat]) for repeat in range(len(of["auto"]))]
    return names, [fixed[name][repeat] for repeat, name in enumerate(names)]


def table(rows: int, figures: Figures) -> str:
    """A line for each group: auto in tokens per second, and over the best fixed number, all nodes, and plain."""
    lines = [f"{rows} rows         auto    /best fixed       /all     /plain"]
    ratios = defaultdict(list)
    for group, of in figures.items():
        names, best = best_fixed(of)
        every = max((name for name in of if name not in ("auto", "plain")), key=int)
        beside = {"best": best, "all": of[every], "plain": of.get("plain", of["0"])}
        cells = {
            name: median(a / b for a, b in zip(of["auto"], speeds, strict=True)) for name, speeds in beside.items()
        }
        for name, ratio in cells.items():
            ratios[name].append(ratio)
        shown = (
            f"{cells['best']:5.3f} ({'/'.join(dict.fromkeys(names)):>5})   {cells['all']:6.3f}  {cells['plain']:9.3f}"
        )
        lines.append(f"{group:12} {median(of['auto']):6.0f}   {shown}")
    mean = {name: geometric_mean(values) for name, values in ratios.items()}
    lines.append(f"{'mean':12} {'':6}   {mean['best']:5.3f}        {mean['all']:9.3f}  {mean['plain']:9.3f}\n")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write -> exit status, see `run_script`."""
    given = parse(arguments)

    def run(progress: Callable[[str], None]) -> None:
        conditions = {
            "engine": Path(given.engine).name,
            "max_new_tokens": given.max_new_tokens,
            "threads": given.threads,
        }
        found = {}
        for rows, figures in measure(given, progress):
            found[rows] = {
                group: {name: [round(each, 1) for each in speeds] for name, speeds in of.items()}
                for group, of in figures.items()
            }
            write_json(given.out, {"conditions": conditions, "tokens_s": found})

    return run_script("bench_ladder", given.threads, run)


if __name__ == "__main__":
    raise SystemExit(main())
