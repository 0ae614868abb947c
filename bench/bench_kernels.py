"""Time the Triton kernels against their eager references on a GPU: python bench/bench_kernels.py [--out FILE]."""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from specstep.controls import BANNED_WORDS, BIASES, STOP_IDS, TOP_LOGPROBS, Sampling
from specstep.kernels.accept import reference as accept_reference
from specstep.kernels.accept.op import accept
from specstep.kernels.choose import reference as choose_reference
from specstep.kernels.choose.op import choose
from specstep.kernels.compact import reference as compact_reference
from specstep.kernels.compact.op import compact
from specstep.kernels.top_log_probs import reference as top_reference
from specstep.kernels.top_log_probs.op import top_log_probs
from specstep.kernels.tree_attention import reference as attention_reference
from specstep.kernels.tree_attention.op import tree_attention
from specstep.kernels.tree_layout import reference as layout_reference
from specstep.kernels.tree_layout.op import tree_layout

Call = Callable[[], Any]

GREEDY = Sampling(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
ASKED = {
    "greedy": GREEDY,
    "temperature": GREEDY._replace(temperature=1.0),
    "top_p": GREEDY._replace(temperature=1.0, top_p=0.95),
    "top_k top_p": GREEDY._replace(temperature=1.0, top_k=50.0, top_p=0.95),
    "penalties": GREEDY._replace(repetition_penalty=1.1),
}


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


def vocabulary_cases(batch: int, nodes: int, vocabulary: int) -> Iterator[tuple[str, dict[str, Any], Call, Call]]:
    """The choice, for what a row may ask, and the likeliest tokens for a drafter and for a report."""
    logits = 4 * torch.randn(batch, nodes, vocabulary, dtype=torch.bfloat16, device="cuda")
    ancestors, depths = tree_layout(*random_trees(batch, nodes))
    tokens, history = (torch.randint(vocabulary, (batch, count), device="cuda") for count in (nodes, 4096))
    rows, none = torch.full((batch,), 4000, device="cuda"), torch.full((batch, BIASES), -1, device="cuda")
    banned = torch.full((batch, nodes, BANNED_WORDS + STOP_IDS), -1, device="cuda")
    allowed = torch.full((batch, nodes, (vocabulary + 31) // 32), -1, dtype=torch.int32, device="cuda")
    tree = (logits, tokens, ancestors, depths, history, rows, rows // 2)
    for asked, row in ASKED.items():
        sampling = torch.tensor([row] * batch, device="cuda")
        args = (*tree, sampling, rows, none, none * 0.0, banned, allowed, rows * 0)
        sizes = {"batch": batch, "nodes": nodes, "vocabulary": vocabulary, "asked": asked}
        yield "choose", sizes, partial(choose, *args), partial(choose_reference.choose, *args)
    places = torch.arange(nodes, device="cuda").expand(batch, -1).contiguous()
    for top, temperature in ((4, 0.0), (4, 1.0), (TOP_LOGPROBS, 0.0)):
        heat = torch.full((batch,), temperature, device="cuda")
        listed = (logits, places, rows, heat, rows, places, None, top)
        sizes = {"batch": batch, "nodes": nodes, "vocabulary": vocabulary, "top": top, "temperature": temperature}
        yield "top_log_probs", sizes, partial(top_log_probs, *listed), partial(top_reference.top_log_probs, *listed)


def all_cases() -> Iterator[tuple[str, dict[str, Any], Call, Call]]:
    for batch, nodes in ((1, 8), (1, 65), (32, 65), (1, 257)):
        yield from tree_cases(batch, nodes)
    for batch, layers in ((1, 32), (32, 4)):
        yield from compact_case(batch, layers)
    for batch, nodes, vocabulary in ((1, 8, 49152), (1, 8, 151936), (4, 16, 151936)):
        yield from vocabulary_cases(batch, nodes, vocabulary)
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
