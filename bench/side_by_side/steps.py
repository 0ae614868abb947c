"""What a step costs against one read of the weights, over cache length, nodes and rows; also load and build."""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import specstep
import torch
from specstep.progress import OnProgress
from specstep.runtime.engine_file import WEIGHTS, read_manifest
from specstep.runtime.inductor.aoti import open_weights

from .engines import OUR_WEIGHTS, Settings
from .machine import MemoryReads
from .ours import built

NODES = (0, 1, 4, 8, 16)
LENGTHS = (128, 256, 512, 1024, 1536)
LENGTH = 256  # where nodes and rows are compared
ROWS, ROW_NODES = (1, 2, 4, 8, 16), 8
WARM_STEPS, STEPS, STEPS_PER_READ = 5, 40, 8
LOAD = """
import time, torch
start = time.perf_counter()
import specstep
engine = specstep.load({folder!r})
next(iter(engine.stream("Why is the sky blue?", 8, ignore_eos=True)))
print(time.perf_counter() - start)
"""


@dataclass(frozen=True)
class Step:
    """A median step. tokens: in each row's cache. one_read_ms: one read of all these weights, as fast as memory was
    read in turn with these steps."""

    weights: str
    nodes: int
    rows: int
    tokens: int
    step_ms: float
    one_read_ms: float


@dataclass(frozen=True)
class Timed:
    """An engine under the clock, and the numbers of nodes that its steps verify."""

    weights: str
    nodes: tuple[int, ...]
    folder: Path
    engine: Any
    weight_bytes: int


def measure_steps(settings: Settings, weights: Sequence[str], quick: bool, progress: OnProgress) -> dict[str, Any]:
    """Build what is not there and time steps of all engines in turn -> what goes into the JSON, `steps` among it."""
    torch.set_num_threads(settings.threads)
    memory = MemoryReads()
    nodes, lengths = ((0, 8), (128, LENGTH, 1536)) if quick else (NODES, LENGTHS)
    engines = list(_engines(settings, weights, nodes, progress))
    steps = [step for length in lengths for step in _over_nodes(engines, length, memory, progress)]
    for timed in engines:
        if ROW_NODES in timed.nodes:
            steps += _over_rows(timed, memory, progress)
    about = {timed.folder.name: read_manifest(timed.folder).about["build_s"] for timed in engines}
    load_s = [_first_token_s(engines[-1].folder) for _ in range(5)] if engines else []
    for timed in engines:
        timed.engine.close()
    return {
        "threads": settings.threads,
        "load_to_first_token_s": statistics.median(load_s) if load_s else None,
        "build_s": about,
        "steps": [asdict(step) for step in steps],
    }


def _engines(
    settings: Settings, weights: Sequence[str], nodes: tuple[int, ...], progress: OnProgress
) -> Iterator[Timed]:
    """Of each precision one that does not draft, and one whose steps verify any of the other numbers of nodes."""
    plain = {"drafter": "none", "max_batch": 1}
    drafting = {"drafter": "ngram", "nodes": nodes[-1], "max_batch": ROWS[-1]}
    for precision in weights:
        for options, counts in ((plain, (0,)), (drafting, nodes[1:])):
            options = options | {"weights": OUR_WEIGHTS[precision], "max_seq_len": settings.slots}
            folder = built(settings, options, progress)
            engine = specstep.load(folder, nodes="all", learning=False)
            stored = open_weights(folder / WEIGHTS, engine.spec).values()
            size = sum(tensor.numel() * tensor.element_size() for tensor in stored)
            yield Timed(precision, counts, folder, engine, size)


def _over_nodes(engines: list[Timed], length: int, memory: MemoryReads, progress: OnProgress) -> list[Step]:
    """Steps of single rows, one of each engine and number of nodes in turn."""
    progress(f"steps at {length} tokens")
    for timed in engines:
        _admit(timed, length)
    sizes = [(timed, nodes) for timed in engines for nodes in timed.nodes]
    times: list[list[float]] = [[] for _ in sizes]
    for done in range(STEPS):
        _read(memory, engines[0], done)
        for (timed, nodes), taken in zip(sizes, times, strict=True):
            taken.append(_step_s(timed, nodes))
    for timed in engines:
        timed.engine.session.release(0)
    speed = memory.bandwidth()
    return [_median(timed, nodes, 1, length, taken, speed) for (timed, nodes), taken in zip(sizes, times, strict=True)]


def _over_rows(timed: Timed, memory: MemoryReads, progress: OnProgress) -> list[Step]:
    """Steps of one engine as rows are added."""
    found = []
    for admitted in range(ROWS[-1]):
        _admit(timed, LENGTH)
        if admitted + 1 in ROWS:
            progress(f"steps of {admitted + 1} rows, {timed.weights}")
            times = []
            for done in range(STEPS):
                _read(memory, timed, done)
                times.append(_step_s(timed, ROW_NODES))
            found.append(_median(timed, ROW_NODES, admitted + 1, LENGTH, times, memory.bandwidth()))
    for row in range(ROWS[-1]):
        timed.engine.session.release(row)
    return found


def _admit(timed: Timed, length: int) -> None:
    prompt = [2 + index * 7919 % 20000 for index in range(length)]  # no repeats: the trees stay what they are
    timed.engine.session.admit(prompt, timed.engine.spec.max_seq_len, [])
    for _ in range(WARM_STEPS):
        timed.engine.session.step()


def _read(memory: MemoryReads, timed: Timed, done: int) -> None:
    """Read memory now and then, and have two steps pass: OpenMP's threads look out for work for a while."""
    if done % STEPS_PER_READ == 0:
        memory.read()
        for _ in range(2):
            timed.engine.session.step(timed.nodes[0])


def _step_s(timed: Timed, nodes: int) -> float:
    start = time.perf_counter()
    timed.engine.session.step(nodes)
    return time.perf_counter() - start


def _median(timed: Timed, nodes: int, rows: int, length: int, taken: list[float], bandwidth: float) -> Step:
    one_read_ms = timed.weight_bytes / bandwidth * 1e3
    return Step(timed.weights, nodes, rows, length, statistics.median(taken) * 1e3, one_read_ms)


def _first_token_s(folder: Path) -> float:
    """Seconds from after `import torch` to the first token, in a process of its own."""
    command = [sys.executable, "-c", LOAD.format(folder=str(folder))]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def steps_table(measured: dict[str, Any]) -> str:
    """As Markdown: step over one read by weights, rows and nodes, a column for each length."""
    lengths = sorted({step["tokens"] for step in measured["steps"]})
    head = "| weights | nodes | rows | " + " | ".join(f"{length} tokens" for length in lengths) + " |"
    lines = [head, "|---|---:|---:|" + "---:|" * len(lengths)]
    cells: dict[tuple[str, int, int], dict[int, str]] = {}
    for step in measured["steps"]:
        cell = f"{step['step_ms']:.1f} ms, {step['step_ms'] / step['one_read_ms']:.1f} reads"
        by_length = cells.setdefault((step["weights"], step["nodes"], step["rows"]), {})
        # The first, as in the picture: an engine for many rows was timed again.
        by_length.setdefault(step["tokens"], cell)
    for (weights, nodes, rows), by_length in cells.items():
        row = " | ".join(by_length.get(length, "") for length in lengths)
        lines.append(f"| {weights} | {nodes} | {rows} | {row} |")
    return "\n".join(lines) + "\n"
