"""What a step costs on a GPU, against reading its weights and caches, and beside transformers: a table.

python bench/gpu_table.py [--quick] [--models llama-3-8b ...] [--trees "chain 4" ...] [--batches 1 4 16]
                          [--lengths 512 4096] [--seconds 540] [--out bench/results/gpu_table.json]

Models and heads have random weights; every step accepts as many drafts as it is told to. One engine for each model and
tree serves all numbers of rows and lengths. Figures are written as they come. `--device cpu --models tiny` runs
anywhere; its figures mean nothing. --keep FOLDER has models and engines stay there, for the next run; --build-only
measures nothing.
"""

import argparse
import contextlib
import gc
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from on_gpu.clock import Deadline, copy_bandwidth, machine
from on_gpu.ours import build_engine, measure_engine
from on_gpu.page import page, with_ratios
from on_gpu.peers import measure_peers, one_line
from on_gpu.shapes import MODELS, TREES, save_random_head, save_random_model
from script import run_script, write_json
from specstep.progress import OnProgress
from specstep.runtime.engine_file import MANIFEST, read_manifest

OUT = Path(__file__).parent / "results" / "gpu_table.json"
ROOM = 128  # tokens that rows and prompts may grow by
QUICK: dict[str, Any] = {"models": ["llama-3.2-1b"], "trees": ["dynamic 16"], "batches": [1, 4], "lengths": [512]}


class Table:
    """What was measured so far, in a file that is written again with each figure."""

    def __init__(self, out: Path, device: str):
        lists: dict[str, Any] = {"cells": [], "peers": [], "errors": []}
        self.out, self.result = out, machine(device) | {"models": {}} | lists | {"left_out": None}

    def add(self, kind: str, entry: Any) -> None:
        """Append to a list of the result, and write it."""
        self.result[kind].append(entry)
        self.write()

    def write(self) -> None:
        """Write all of it."""
        write_json(self.out, self.result)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status as `run_script`; 1 where something failed or nothing was measured, 2 too where there is no GPU."""
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_table: expected an NVIDIA GPU that torch can use, found none; nothing was measured", file=sys.stderr)
        return 2
    table = Table(options.out, options.device)
    if options.build_only:
        return run_script("gpu_table", options.threads, lambda progress: build_only(options, progress))
    status = run_script("gpu_table", options.threads, lambda progress: measure(table, options, progress))
    print(page(table.result), flush=True)
    return status or int(bool(table.result["errors"]) or not table.result["cells"])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What --quick leaves open is what was asked for, or everything that is not tiny."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument("--trees", nargs="+", choices=TREES)
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--steps", type=int, default=30, help="steps of each figure")
    parser.add_argument("--quick", action="store_true", help="one model, one tree, few sizes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after so long")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--keep", type=Path, help="folder of models and engines, those that are there are used")
    parser.add_argument("--build-only", action="store_true", help="build the engines in --keep")
    options = parser.parse_args(arguments)
    if options.build_only and not options.keep:
        parser.error("--build-only: expected --keep FOLDER")
    every = {"models": ["llama-3.2-1b", "llama-3-8b"], "trees": [*TREES], "batches": [1, 4, 16], "lengths": [512, 4096]}
    for name, values in (every | (QUICK if options.quick else {})).items():
        setattr(options, name, getattr(options, name) or values)
    return options


def build_only(options: argparse.Namespace, progress: OnProgress) -> None:
    """Build all engines, measure none."""
    for name in options.models:
        for tree in options.trees:
            build(options, name, tree, options.keep / name, progress)


def build(options: argparse.Namespace, name: str, tree: str, folder: Path, progress: OnProgress) -> Path:
    """The engine of a model and a tree; with the model and its head, unless they are there."""
    engine = folder / tree.replace(" ", "-")
    if not (engine / MANIFEST).is_file():
        model = save_random_model(folder / "model", name, options.device, getattr(torch, options.dtype))
        head = save_random_head(folder / "head", name)
        give_memory_back()
        build_engine(
            model.folder, head, engine, progress=progress, device=options.device, dtype=options.dtype,
            max_batch=max(options.batches), max_seq_len=max(options.lengths) + ROOM, **TREES[tree],
        )  # fmt: skip
        give_memory_back()
    return engine


def measure(table: Table, options: argparse.Namespace, progress: OnProgress) -> None:
    """All models: ours, and then the others."""
    deadline = Deadline(options.seconds)
    for name in options.models:
        with contextlib.ExitStack() as stack:
            folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            _measure_model(table, options, name, folder / name, deadline, progress)
    if deadline.refused:
        table.result["left_out"] = f"what had not begun after {options.seconds:.0f} s"
        table.write()


def _measure_model(
    table: Table, options: argparse.Namespace, name: str, folder: Path, deadline: Deadline, progress: OnProgress
) -> None:
    progress(f"{name}: random weights")
    model = save_random_model(folder / "model", name, options.device, getattr(torch, options.dtype))
    give_memory_back()
    about = model.sizes | {"bandwidth": copy_bandwidth(options.device)}
    table.result["models"][name] = about | {"dtype": options.dtype}
    table.write()
    for tree in options.trees:
        try:
            for cell in _cells(options, name, tree, folder, deadline, progress):
                said = {"model": name, "tree": tree, "nodes": TREES[tree]["nodes"]}
                table.add("cells", said | with_ratios(cell, **about))
        except Exception as error:  # an engine that fails stops no other
            table.add("errors", f"{name}, {tree}: {one_line(error)}")
        give_memory_back()
    loaded = model.load(options.device)
    for peer in measure_peers(loaded, options.batches, options.lengths, deadline, progress):
        table.add("peers", {"model": name} | peer)
        if "error" in peer:
            table.add("errors", f"{name}, {peer['peer']}: {peer['error']}")
    del loaded
    give_memory_back()


def _cells(
    options: argparse.Namespace, name: str, tree: str, folder: Path, deadline: Deadline, progress: OnProgress
) -> Iterator[dict[str, Any]]:
    """Build the engine of a tree, measure it, and remove it, for a disk may not hold several, unless it is to stay."""
    if deadline.passed():
        return
    engine = build(options, name, tree, folder, progress)
    build_s = read_manifest(engine).about["build_s"]
    for cell in measure_engine(engine, options.batches, options.lengths, options.steps, deadline):
        yield cell | {"build_s": build_s}
    if not options.keep:
        shutil.rmtree(engine)


def give_memory_back() -> None:
    """Have the device's memory that nothing uses free for what is next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
