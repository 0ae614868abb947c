"""Caches in pages beside dense ones: memory after long rows have ended, the time of a prefix hit, and that of a step.

    python bench/bench_caches.py engines/wide --rows 64 --prefix 4000

An engine of `--max-batch 64 --max-seq-len 8192` is what it is made for. Both kinds run in turn in one process, with the
same programs; times are medians.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from script import run_script, write_json

RESULT = Path(__file__).parent / "results" / "caches.json"
SHORT = 500  # tokens that each row holds at the end
ROUNDS, STEPS = 9, 12


def main() -> int:
    """Measure and write -> exit status, see `run_script`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=4000, help="tokens that a prompt shares with one before")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    return run_script("bench_caches", options.threads, lambda progress: run(options, progress))


def run(options: argparse.Namespace, progress: Callable[[str], None]) -> None:
    """Both kinds, as JSON and a line for each figure."""
    from specstep.runtime.inductor import torch_session
    from specstep.runtime.inductor.dense_cache import DenseCache

    def dense(specs: Any, device: Any) -> dict[str, DenseCache]:
        return {spec.name: DenseCache(spec, device) for spec in specs}

    figures: dict[str, dict[str, float]] = {}
    progress("memory of paged caches")
    figures["paged"] = {"MiB of an engine whose rows were long": memory_after(options)}
    with mock.patch.object(torch_session, "make_caches", dense):
        progress("memory of dense caches")
        figures["dense"] = {"MiB of an engine whose rows were long": memory_after(options)}
        other = open_engine(options)
    progress("times")
    times: dict[str, dict[str, list[float]]] = {"paged": {}, "dense": {}}
    with other as dense_engine, open_engine(options) as paged_engine:
        engines = {"paged": paged_engine, "dense": dense_engine}
        prefixes = {kind: fill_prefix(engine, options.prefix) for kind, engine in engines.items()}
        for _ in range(ROUNDS):
            for kind, engine in engines.items():
                for name, took in times_of(engine, prefixes[kind], options.prefix).items():
                    times[kind].setdefault(name, []).extend(took)
    for kind, by_name in times.items():
        figures[kind] |= {f"ms {name}": 1e3 * statistics.median(took) for name, took in by_name.items()}
        print(kind, *(f"{name}: {value:.2f}" for name, value in figures[kind].items()), sep="\n  ")
    write_json(options.out, {"rows": options.rows, "prefix": options.prefix, **figures})


def open_engine(options: argparse.Namespace) -> Any:
    import specstep

    return specstep.load(options.engine, nodes="all")


def resident() -> float:
    """MiB that this process takes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def memory_after(options: argparse.Namespace) -> float:
    """What an engine takes where each row held its longest text once, and holds SHORT tokens then. Slots are written to
    as a program does, which would take long to fill so many."""
    before = resident()
    with open_engine(options) as engine:
        session = engine.session
        for slots in (session.spec.max_seq_len, SHORT):
            rows = [session.begin([5, 6], slots, []) for _ in range(options.rows)]
            for row in rows:
                session._written[row] = slots
                for cache in session.caches.values():
                    cache[row, :, :slots] = 1
            held = resident() - before
            for row in rows if slots > SHORT else ():
                session.release(row)
        return held


def fill_prefix(engine: Any, length: int) -> Any:
    """A prompt's keys and values in the store -> where."""
    session, prompt = engine.session, [40 + i % 97 for i in range(length + 2)]
    session.make_store(length + 64)
    row = session.admit(prompt, length + 100, [])
    session.keep(row, 0, session.spec.lookahead, length)  # as `PrefixCache` has it
    session.release(row)
    return prompt


def times_of(engine: Any, prompt: list[int], length: int) -> dict[str, list[float]]:
    """Seconds of a hit, of the step behind it, and of further ones."""
    session = engine.session
    row, begin = session.begin(prompt, length + 100, []), time.perf_counter()
    session.resume(row, length, [(0, session.spec.lookahead, length)])
    hit = time.perf_counter() - begin
    session.fill(row, session.spec.prefill_chunk)
    took = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        session.step()
        took.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    session.release(row)
    end = time.perf_counter() - begin
    return {"of a hit": [hit], "of the step behind it": took[:1], "of a step": took[2:], "of a row's end": [end]}


if __name__ == "__main__":
    sys.exit(main())
