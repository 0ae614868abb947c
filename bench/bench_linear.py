"""Packed linear layers against `torch.nn.functional.linear` and against reading memory, in GB/s of weight.

Every measurement walks through layers of different weights, more of them than the caches hold, as a model does. The
contenders take turns, so that a busy machine slows all of them alike. Run: `python bench/bench_linear.py`.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from specstep.kernels.linear.op import packed_linear
from specstep.kernels.linear.packing import pack
from torch import Tensor

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate, up": (3072, 576), "down": (576, 1536), "lm_head": (49152, 576)}
ROWS = (1, 8, 16, 32, 256)
WORKING_SET = 256 << 20  # bytes


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def medians(contenders: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each contender, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats + 1):
        for name, run in contenders.items():
            times[name].append(seconds(run))
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def through(layers: list[Tensor], x: Tensor, linear: Callable[..., Tensor]) -> Callable[[], None]:
    def run() -> None:
        for weight in layers:
            linear(x, weight)

    return run


def measure_shape(columns: int, depth: int, dtype: torch.dtype, repeats: int) -> dict[int, dict[str, float]]:
    """GB/s per number of rows and contender; `read` is a sum over the same bytes."""
    count = WORKING_SET // (columns * depth * dtype.itemsize)
    layers = list(torch.randn(count, columns, depth, dtype=dtype))
    packed = [pack(weight) for weight in layers]
    used = count * columns * depth * dtype.itemsize
    words = torch.ones(used // 4)
    table = {}
    for rows in ROWS:
        x = torch.randn(rows, depth).to(dtype)
        contenders: dict[str, Callable[[], object]] = {
            "read": words.sum,
            "aten": through(layers, x, torch.nn.functional.linear),
            "packed": through(packed, x, lambda x, weight: packed_linear(x, weight, None, columns)),
        }
        table[rows] = {name: used / taken / 1e9 for name, taken in medians(contenders, repeats).items()}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{arguments.dtype}, {arguments.threads} threads, GB/s of weight: read / F.linear / packed_linear")
    print("layer".ljust(24), *(f"M={rows}".rjust(20) for rows in ROWS))
    for name, (columns, depth) in SHAPES.items():
        table = measure_shape(columns, depth, getattr(torch, arguments.dtype), arguments.repeats)
        cells = (f"{row['read']:6.1f} {row['aten']:6.1f} {row['packed']:6.1f}".rjust(20) for row in table.values())
        print(f"{name} [{columns}, {depth}]".ljust(24), *cells, flush=True)


if __name__ == "__main__":
    main()
