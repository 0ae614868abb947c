"""Tree attention beside SDPA and FlexAttention, and a model's products, each against reading what it must.

python bench/bench_floor.py [--quick] [--models llama-3-8b] [--out bench/results/floor.json]

Microseconds of a layer, within CUDA graphs. Figures are written as they come. `--device cpu --models tiny` runs
anywhere.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from on_gpu import attention, products
from on_gpu.clock import Deadline, copy_bandwidth, machine
from on_gpu.shapes import MODELS
from script import write_json

OUT = Path(__file__).parent / "results" / "floor.json"
QUICK = {"batches": (1,), "nodes": (17,), "lengths": (512, 4096)}
EVERY = {"batches": attention.BATCHES, "nodes": attention.NODES, "lengths": attention.LENGTHS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 where time was over before anything was measured, 2 where there is no GPU."""
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("bench_floor: expected an NVIDIA GPU that torch can use, found none; nothing measured", file=sys.stderr)
        return 2
    bandwidth, dtype = copy_bandwidth(options.device), getattr(torch, options.dtype)
    result: dict[str, Any] = machine(options.device) | {"dtype": options.dtype, "bandwidth": bandwidth}
    result |= {"attention": [], "products": []}
    deadline, place = Deadline(options.seconds), (options.device, dtype, bandwidth)
    for model in options.models:
        for kind, figures in (
            ("attention", attention.measure_attention(model, *place, **(QUICK if options.quick else EVERY))),
            ("products", products.measure_products(model, *place)),
        ):
            while not deadline.passed() and (figure := next(figures, None)):
                result[kind].append(figure)
                write_json(options.out, result)
                print(" ".join(f"{name}={_short(value)}" for name, value in figure.items()), flush=True)
    return int(not result["attention"])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama-3.2-1b", "llama-3-8b"])
    parser.add_argument("--quick", action="store_true", help="fewer sizes of attention")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after so long")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args(arguments)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace(" ", "")


if __name__ == "__main__":
    sys.exit(main())
