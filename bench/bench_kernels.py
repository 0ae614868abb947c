"""Time the Triton kernels against their eager references on a GPU: python bench/bench_kernels.py [--out FILE]."""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from specstep.kernels.accept import reference as accept_reference
from specstep.kernels.accept.op import accept
from specstep.kernels.compact import reference as compact_reference
from specstep.kernels.compact.op import compact
from specstep.kernels.tree_attention import reference as attention_reference
from specstep.kernels.tree_attention.op import tree_attention
from specstep.kernels.tree_layout import reference as layout_reference
from specstep.kernels.tree_layout.op import tree_layout

Call = Callable[[], Any]


def random_trees(batch: int, nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    parents = (torch.rand(batch, nodes) * torch.arange(nodes)).long()
    parents[:, 0] = -1
    return parents.cuda(), torch.ones(batch, nodes, dtype=torch.bool, device="cuda")


def tree_cases(batch: int, nodes: int) -> Iterator[tuple[str, dict[str, Any], Call, Call]]:
    """(kernel, sizes, Triton call, reference call)"""
    sizes = {"batch": batch, "nodes": nodes}
    trees = random_trees(batch, nodes)
    yield "tree_layout", sizes, lambda: tree_layout(*trees), lambda: layout_reference.tree_layout(*trees)
    ancestors, depths = tree_layout(*trees)
    tokens, choice = (torch.randint(4, (batch, nodes), device="cuda") for _ in range(2))
    args = (tokens, *trees, ancestors, depths, choice, 8)
    yield "accept", sizes, lambda: accept(*args), lambda: accept_reference.accept(*args)


def compact_case(batch: int, layers: int) -> Iterator[tuple[str, dict[str, Any], Call, Call]]:
    caches = [torch.zeros(batch, 8, 2048, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2 * layers)]
    path = torch.tensor([[0, 3, 9, 20, 41]], device="cuda").expand(batch, 5).contiguous()
    args = (torch.full((batch,), 1500, device="cuda"), path, torch.full((batch,), 4, device="cuda"))
    sizes = {"batch": batch, "layers": layers, "accepted": 4}
    yield "compact", sizes, lambda: compact(caches, *args), lambda: compact_reference.compact(caches, *args)


def attention_case(batch: int, nodes: int, length: int) -> Iterator[tuple[str, dict[str, Any], Call, Call]]:
    """Llama-3-8B heads: 32 query heads, 8 key heads, head dimension 128."""
    slots = length + nodes
    q = torch.randn(batch, 32, nodes, 128, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(batch, 8, slots, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    ancestors, depths = tree_layout(*random_trees(batch, nodes))
    lengths = torch.full((batch,), length, device="cuda")
    args = (q, k, v, lengths, depths, ancestors, depths, 128**-0.5)
    sizes = {"batch": batch, "nodes": nodes, "length": length, "cache_bytes": 2 * k.numel() * k.element_size()}
    yield "tree_attention", sizes, lambda: tree_attention(*args), lambda: attention_reference.tree_attention(*args)


def all_cases() -> Iterator[tuple[str, dict[str, Any], Call, Call]]:
    for batch, nodes in ((1, 8), (1, 65), (32, 65), (1, 257)):
        yield from tree_cases(batch, nodes)
    for batch, layers in ((1, 32), (32, 4)):
        yield from compact_case(batch, layers)
    for batch, nodes, length in ((1, 8, 1024), (1, 65, 1024), (1, 65, 8192), (1, 8, 32768), (16, 65, 2048)):
        yield from attention_case(batch, nodes, length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench_kernels.json"), help="JSON file to write")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_kernels: needs an NVIDIA GPU; nothing measured")
        return
    import triton
    from triton.testing import do_bench_cudagraph

    torch.manual_seed(0)
    results = []
    # In CUDA graphs, as a step replays them: without, small kernels would measure Python and the launch.
    with torch.cuda.stream(torch.cuda.Stream()):
        for kernel, sizes, run, reference in all_cases():
            times = {"triton_ms": do_bench_cudagraph(run), "reference_ms": do_bench_cudagraph(reference)}
            results.append({"kernel": kernel, **sizes, **times, "speedup": times["reference_ms"] / times["triton_ms"]})
            print(results[-1], flush=True)
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    report = {"device": torch.cuda.get_device_name(), **versions, "results": results}
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
