"""Whether `--nodes auto` finds the best number of nodes: beside every fixed number, by rows and kind of text.

    python bench/bench_ladder.py engines/smol                      # an engine with 16 rows shows most
    python bench/bench_ladder.py engines/smol --plain engines/plain --rows 1,8 --prompts FILE.jsonl

All answer the same prompts in turn, in another order each time: greedy ones of each category, hopeless ones (sampled
at a temperature of 2, where next to no draft hits), and both mixed. After two repeats the two best fixed numbers of a
group go on alone, beside auto, all nodes and plain. The best is the one that was best in the other repeats: the best of
several noisy figures would flatter itself. --plain: an engine of the same model without a drafter.
bench/results/ladder.json has all figures.
"""

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean, median

from script import run_script, write_json

BENCH = Path(__file__).parent
RUNGS = (0, 1, 2, 3, 5, 7)
SIFTED, FINALISTS = 2, 2  # after how many repeats how many fixed numbers are left
HOPELESS = {"temperature": 2.0}
Figures = dict[str, dict[str, list[float]]]  # group of prompts -> contender -> tokens per second of each repeat


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", metavar="DIR")
    parser.add_argument("--plain", metavar="DIR", help="an engine without a drafter")
    parser.add_argument("--prompts", type=Path, default=BENCH / "side_by_side" / "questions.jsonl")
    parser.add_argument("--rows", default="1,2,4,8,16", help="prompts at a time")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=8, help="2 or more")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=BENCH / "results" / "ladder.json")
    given = parser.parse_args(arguments)
    if given.repeats < SIFTED:
        parser.error(f"--repeats: expected {SIFTED} or more, got {given.repeats}")
    return given


def groups(file: Path, rows: int) -> dict[str, list[tuple[str, dict[str, float]]]]:
    """As many prompts with their sampling for each category, for hopeless ones, and for a mix; prompts come again where
    there are fewer."""
    prompts = defaultdict(list)
    for line in file.read_text().splitlines():
        entry = json.loads(line)
        prompts[entry["category"]].append(entry.get("prompt") or entry["turns"][0])
    every = [prompt for several in prompts.values() for prompt in several]

    def some(of: Sequence[str], sampling: Callable[[int], dict[str, float]]) -> list[tuple[str, dict[str, float]]]:
        return [(of[place % len(of)], sampling(place)) for place in range(rows)]

    found = {category: some(several, lambda _: {}) for category, several in prompts.items()}
    found["hopeless"] = some(every, lambda place: HOPELESS | {"seed": place})
    return found | {"mixed": some(every, lambda place: HOPELESS | {"seed": place} if place % 2 else {})}


def measure(given: argparse.Namespace, report: Callable[[str], None]) -> Iterator[tuple[int, Figures]]:
    """Rows and their figures, as they come."""
    import specstep

    engines = {"auto": specstep.load(given.engine, nodes="auto", learning=False, report=report)}
    rungs = [rung for rung in RUNGS if rung < engines["auto"].spec.nodes] + [engines["auto"].spec.nodes]
    engines |= {str(rung): specstep.load(given.engine, nodes=rung, learning=False) for rung in rungs}
    if given.plain:
        engines["plain"] = specstep.load(given.plain)
    order = random.Random(0)
    for rows in map(int, given.rows.split(",")):
        figures: Figures = defaultdict(lambda: defaultdict(list))
        for repeat in range(-1, given.repeats):  # the first one warms up
            for group, asked in groups(given.prompts, rows).items():
                report(f"{rows} rows, {group}")
                asking = finalists(figures[group]) if repeat >= SIFTED else list(engines)
                for name in order.sample(asking, len(asking)):
                    speed = _generate(engines[name], asked, given.max_new_tokens)
                    if repeat >= 0:
                        figures[group][name].append(speed)
        print(table(rows, figures), flush=True)
        yield rows, figures


def _generate(engine, asked, most):  # type: ignore[no-untyped-def]
    """Tokens per second of all answers, from the first prompt that is prefilled to the end."""
    chat = engine.has_chat_template
    requests = [
        engine.request(prompt, most, chat=chat, sampling=sampling, ignore_eos=True) for prompt, sampling in asked
    ]
    begin = time.perf_counter()
    for _ in engine.run(requests):
        pass
    return sum(len(request.tokens) for request in requests) / (time.perf_counter() - begin)


def fixed(of: dict[str, list[float]]) -> list[str]:
    """The contenders of fixed numbers of nodes, the fewest first."""
    return sorted((name for name in of if name not in ("auto", "plain")), key=int)


def finalists(of: dict[str, list[float]]) -> list[str]:
    """Who goes on after the first repeats."""
    best = sorted(fixed(of), key=lambda name: sum(of[name][:SIFTED]))[-FINALISTS:]
    return [name for name in of if name in (*best, fixed(of)[-1], "auto", "plain")]


def best_fixed(of: dict[str, list[float]]) -> tuple[list[str], list[float]]:
    """The fixed numbers that were best in all other repeats, one for each repeat, and their speed in it."""
    repeats = len(of["auto"])
    last = [name for name in fixed(of) if len(of[name]) == repeats]
    names = [max(last, key=lambda name: sum(of[name]) - of[name][repeat]) for repeat in range(repeats)]
    return names, [of[name][repeat] for repeat, name in enumerate(names)]


def table(rows: int, figures: Figures) -> str:
    """A line for each group: auto in tokens per second, and over the best fixed number, all nodes, and plain."""
    lines = [f"{rows} rows         auto    /best fixed       /all     /plain"]
    ratios = defaultdict(list)
    for group, of in figures.items():
        names, best = best_fixed(of)
        beside = {"best": best, "all": of[fixed(of)[-1]], "plain": of.get("plain", of["0"])}
        cells = {
            name: median(a / b for a, b in zip(of["auto"], speeds, strict=False)) for name, speeds in beside.items()
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

    def run(report: Callable[[str], None]) -> None:
        conditions = {
            "engine": Path(given.engine).name,
            "max_new_tokens": given.max_new_tokens,
            "threads": given.threads,
        }
        found = {}
        for rows, figures in measure(given, report):
            found[rows] = {
                group: {name: [round(each, 1) for each in speeds] for name, speeds in of.items()}
                for group, of in figures.items()
            }
            write_json(given.out, {"conditions": conditions, "tokens_s": found})

    return run_script("bench_ladder", given.threads, run)


if __name__ == "__main__":
    raise SystemExit(main())
