"""`make gpu-check`: what is promised on a GPU, checked and timed on this machine's in eight minutes, kept as JSON.

python bench/gpu_check.py [--out bench/results] [--parts engines ...] [--jobs 12] [--engines engines/gpu]

Building an engine takes one core a minute and more. `make gpu-engines` builds those of the tests ahead, on any machine.
The most telling part comes first. Each is written when it is done, has a time limit, and stops no other; what it does
not use of its time is left to those that follow. The engine whose steps are timed is built beside the tests.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from on_gpu.clock import machine
from script import write_json

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "bench"
ENGINES = "tests/test_gpu.py"
STOPS = 5  # seconds that a script has to end by itself before its limit
# Of tests: each builds an engine of its own, beside those of other workers.
FEW_THREADS = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "1"}
KEPT = "{kept}"  # stands for a folder that is there for one run
MEMORY_OF_A_WORKER = 6 << 30  # bytes of the host, with the compilers that it starts


@dataclass(frozen=True)
class Part:
    """seconds: its share of the eight minutes. tests: what pytest runs of it; or script: a benchmark and its
    arguments."""

    seconds: float
    tests: tuple[str, ...] = ()
    script: tuple[str, ...] = ()


PARTS = {  # 470 seconds, and ten to start; with two GPUs a minute more, for the last one, which skips itself elsewhere
    "engines": Part(75, (ENGINES, "-k", "float32")),  # 45 of engines that were built ahead
    "requests": Part(65, ("tests/test_gpu_requests.py",)),
    "low precision": Part(50, (ENGINES, "-k", "low_precision")),
    "tensorrt": Part(30, (ENGINES, "-k", "tensorrt")),
    "kernels": Part(130, ("tests/kernels", "-m", "gpu")),  # 113 to 124 on the H200, of which compiling takes most
    "attention and products": Part(35, script=("bench_floor.py", "--quick", "--models", "llama-3-8b")),
    "steps": Part(85, script=("gpu_table.py", "--quick", "--keep", KEPT)),
    "ranks": Part(60, ("tests/test_gpu_ranks.py",)),
}
BUILD = ("gpu_table.py", "--quick", "--build-only", "--keep", KEPT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 all passed, 1 something failed, 2 there is no GPU to check on."""
    options = parse(arguments)
    if not torch.cuda.is_available():
        print("gpu-check: expected an NVIDIA GPU that torch can use, found none; nothing was checked", file=sys.stderr)
        return 2
    out = options.out.resolve()
    if options.engines:
        os.environ["SPECSTEP_GPU_ENGINES"] = str(options.engines.resolve())
    result: dict[str, Any] = machine("cuda") | {"parts": {}}
    with tempfile.TemporaryDirectory() as kept, Building(options.parts, kept) as building:
        end = time.monotonic()
        for name in options.parts:
            part = PARTS[name]
            end += part.seconds
            if part.script:  # what is timed is alone
                building.wait(end - time.monotonic())
            left = end - time.monotonic()
            found = run_tests(part.tests, left, options.jobs) if part.tests else run_bench(name, part, left, out, kept)
            result["parts"][name] = found
            write_json(out / "gpu_check.json", result)
            print(f"{name}: {summary(found)}", flush=True)
    return int(any(part["failed"] for part in result["parts"].values()))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=BENCH / "results", help="folder for the JSON")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="only these")
    parser.add_argument("--engines", type=Path, help="folder of engines that were built ahead")
    parser.add_argument("--jobs", type=int, default=workers(), help="tests at once")
    return parser.parse_args(arguments)


def workers() -> int:
    """As many as the host's cores and memory take, some of them left to the compilers."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min((os.cpu_count() or 1) * 3 // 4, memory // MEMORY_OF_A_WORKER))


def run_tests(tests: Sequence[str], seconds: float, jobs: int = 1) -> dict[str, Any]:
    """Run tests -> how many passed and were skipped and why, those that failed with what they said, what tests noted,
    and the time they took. What does not end in time, or has no test to run, is a failure, too."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines"
        command = [sys.executable, "-m", "pytest", "-q", *tests, "-p", "pytest_lines", "--lines", str(lines)]
        status = run_limited([*command, "-n", str(jobs), "--dist", "worksteal"], seconds, FEW_THREADS)
        told = lines.read_text().splitlines(keepends=True) if lines.is_file() else []
        cases = [json.loads(line) for line in told if line.endswith("\n")]  # one that was killed may leave half a line
    failed = {case["name"]: case["said"] for case in cases if case["outcome"] == "failed"}
    if status != 0 and (not failed or status != 1):  # 1: some failed
        failed["pytest"] = f"ended with {status}"
    counts = Counter(case["outcome"] for case in cases)
    return {
        "passed": counts["passed"],
        "skipped": Counter(case["said"] for case in cases if case["outcome"] == "skipped"),
        "failed": failed,
        "noted": {case["name"]: case["properties"] for case in cases if case["properties"]},
        "slowest": {case["name"]: case["seconds"] for case in sorted(cases, key=lambda c: -c["seconds"])[:5]},
        "seconds": round(time.monotonic() - started, 1),
    }


def run_bench(name: str, part: Part, seconds: float, out: Path, kept: str) -> dict[str, Any]:
    """Run a benchmark, which writes what it measures as it comes -> where that is, and how many figures it has. One
    that takes too long has not failed if there are any: a slow machine is no defect."""
    started, path = time.monotonic(), out / f"gpu_{name.replace(' ', '_')}.json"
    path.unlink(missing_ok=True)
    command = [*script_command(part.script, kept), "--out", str(path)]
    status = run_limited([*command, "--seconds", str(max(seconds - STOPS, 1))], seconds)
    figures = count_figures(path)
    failed = {} if figures and (status == 0 or isinstance(status, str)) else {part.script[0]: f"ended with {status}"}
    found = {"file": path.name, "figures": figures, "ended": status, "failed": failed}
    return found | {"seconds": round(time.monotonic() - started, 1)}


def count_figures(path: Path) -> int:
    """Entries of the lists in a benchmark's file, 0 where there is none."""
    lists = json.loads(path.read_text()).values() if path.is_file() else ()
    return sum(isinstance(entry, dict) for each in lists if isinstance(each, list) for entry in each)


def script_command(script: Sequence[str], kept: str) -> list[str]:
    """The command of a benchmark and its arguments."""
    return [sys.executable, str(BENCH / script[0]), *(kept if each == KEPT else each for each in script[1:])]


class Building:
    """Builds what the parts will time while others run; it does nothing where no part does."""

    def __init__(self, parts: Sequence[str], kept: str):
        wanted = any(KEPT in PARTS[name].script for name in parts)
        self._process = start(script_command(BUILD, kept)) if wanted else None

    def wait(self, seconds: float) -> None:
        """Let it end, or end it. What it did not build, the part itself will."""
        if self._process is not None:
            finish(self._process, seconds)

    def __enter__(self) -> "Building":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait(0)


def run_limited(command: Sequence[str], seconds: float, more: Mapping[str, str] = {}) -> int | str:
    """Run a command from the checkout's root, more: of its environment -> its exit status, or that it took too long."""
    return finish(start(command, more), seconds)


def start(command: Sequence[str], more: Mapping[str, str] = {}) -> subprocess.Popen[bytes]:
    """Start a command, with all that it will start in a group."""
    paths = os.pathsep.join([str(ROOT / "bench"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | more | {"PYTHONPATH": paths}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)


def finish(process: subprocess.Popen[bytes], seconds: float) -> int | str:
    """Wait for a process -> its exit status; or that it took too long, when it was killed with its group: compilers and
    workers would hold the cores and the GPU."""
    try:
        return process.wait(max(seconds, 0))
    except subprocess.TimeoutExpired:
        return f"more than {seconds:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def summary(part: dict[str, Any]) -> str:
    """A part in a line, what its drafts changed in another, and a line for each failure."""
    gaps = [flip["gap"] for noted in part.get("noted", {}).values() for flip in noted.get("flips", ())]
    parted = [f"  {len(gaps)} answers part from the plain ones, at gaps of {max(gaps)} at most"] if gaps else []
    tests = f"{part['passed']} passed, {part['skipped'].total()} skipped" if "passed" in part else ""
    head = f"{tests or str(part['figures']) + ' figures'}, {len(part['failed'])} failed in {part['seconds']} s"
    return "\n".join([head, *parted, *(f"  {name}: {said}" for name, said in part["failed"].items())])


if __name__ == "__main__":
    sys.exit(main())
