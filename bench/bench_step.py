"""`make bench`: what a step costs, against one read of the weights; load to first token; build time.

    python bench/bench_step.py [--model smollm2-135m] [--nodes 0 1 4 8 16] [--dtype bfloat16] [--out FILE]

Engines are built once under `--engines` and timed side by side: one step of each in turn, so that a busy machine slows
all alike. Medians; ratios are what to compare.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import specstep
import torch
from specstep.runtime.engine_file import read_manifest
from specstep.runtime.inductor.aoti import open_weights

ROOT = Path(__file__).parent.parent
LOAD = """
import time, torch
start = time.perf_counter()
import specstep
engine = specstep.load({folder!r})
next(iter(engine.stream("Why is the sky blue?", 8, ignore_eos=True)))
print(time.perf_counter() - start)
"""


def read_bandwidth(repeats: int = 15) -> float:
    """Bytes per second at which all threads together read memory: the best of several passes over 512 MB."""
    data = torch.ones(2**26, dtype=torch.int64)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return data.numel() * 8 / min(times)


def build(model: str, nodes: int, dtype: str, folder: Path) -> float:
    """Build the engine unless it is there -> seconds its build took."""
    if not (folder / "manifest.json").is_file():
        drafter = {"drafter": "none"} if nodes == 0 else {"drafter": "ngram", "nodes": nodes}
        specstep.build(model, folder, dtype=dtype, report=print, **drafter)
    return read_manifest(folder).about["build_s"]


def step_times(engines: list, length: int, steps: int) -> list[list[float]]:
    """Seconds of `steps` steps of each engine, taken in turn, from a context of about `length` tokens on."""
    for engine in engines:
        prompt = [2 + index * 7919 % 20000 for index in range(length)]  # no repeats: the trees stay what they are
        engine.session.admit(prompt, engine.spec.max_seq_len, [])
        for _ in range(5):
            engine.session.step()
    times: list[list[float]] = [[] for _ in engines]
    for _ in range(steps):
        for engine, taken in zip(engines, times, strict=True):
            start = time.perf_counter()
            engine.session.step()
            taken.append(time.perf_counter() - start)
    for engine in engines:
        engine.session.release(0)
    return times


def main() -> None:
    """Build, time, print a table, write JSON."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--nodes", type=int, nargs="+", default=[0, 1, 4, 8, 16])
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--engines", default=str(ROOT / "engines" / "bench"))
    options.add_argument("--out", default=str(ROOT / "bench" / "results" / "step.json"))
    options.add_argument("--steps", type=int, default=60)
    given = options.parse_args()
    folders = {nodes: Path(given.engines) / f"{Path(given.model).name}-{given.dtype}-{nodes}" for nodes in given.nodes}
    build_s = {nodes: build(given.model, nodes, given.dtype, folder) for nodes, folder in folders.items()}
    engines = [specstep.load(folder) for folder in folders.values()]
    stored = open_weights(folders[given.nodes[0]], engines[0].spec).values()
    weights = sum(tensor.numel() * tensor.element_size() for tensor in stored)
    bandwidth = read_bandwidth()
    floor = weights / bandwidth
    rows = []
    for length in (128, 512, 1536):
        for nodes, times in zip(given.nodes, step_times(engines, length, given.steps), strict=True):
            median = statistics.median(times)
            rows.append({"tokens": length, "nodes": nodes, "step_ms": median * 1e3, "of_one_read": median / floor})
    command = [sys.executable, "-c", LOAD.format(folder=str(folders[given.nodes[-1]]))]
    load = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(5)]
    result = {
        "model": given.model,
        "dtype": given.dtype,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "weights_mb": weights / 1e6,
        "read_gb_s": bandwidth / 1e9,
        "one_read_ms": floor * 1e3,
        "load_to_first_token_s": statistics.median(load),
        "build_s": build_s,
        "steps": rows,
    }
    Path(given.out).parent.mkdir(parents=True, exist_ok=True)
    Path(given.out).write_text(json.dumps(result, indent=1) + "\n")
    print(f"one read of {weights / 1e6:.0f} MB at {bandwidth / 1e9:.1f} GB/s: {floor * 1e3:.2f} ms")
    print(f"load to first token {result['load_to_first_token_s']:.2f} s; builds {build_s} s")
    print("  tokens   nodes   step ms   of one read")
    for row in rows:
        print(f"  {row['tokens']:6}  {row['nodes']:6}  {row['step_ms']:8.2f}  {row['of_one_read']:12.2f}x")


if __name__ == "__main__":
    main()
