"""`specstep build`."""

import argparse
import os
import sys

from ..controls import LEARNED_ROWS
from ..errors import needs_extra
from .build_options import add_build_options
from .progress import Progress
from .terminal import say

HELP = "compile a model and a drafter into an engine directory"
EXAMPLES = """examples:
  specstep build smollm2-135m -o engines/smol --stats
  specstep build ./Qwen3-0.6B -o engines/qwen --dtype bfloat16 --max-seq-len 4096 --max-batch 4
  specstep build ./Qwen3-0.6B -o engines/mine --adapter ./my-lora
  specstep build ./big -o engines/big --drafter ./small --nodes 5
  specstep build ./Qwen3-0.6B -o engines/own --drafter ngram,bigrams:from_corpus   # docs/your-own-drafter.md
  specstep build ./Qwen3-0.6B -o engines/fast --weights int8          # half the memory, a faster step on a CPU
  specstep build ./Qwen3-0.6B -o engines/h100 --device cuda --compute-capability 9.0   # on a machine without a GPU
  specstep build ./Qwen3-0.6B -o engines/rtx --backend tensorrt-rtx --compute-capability 8.9 12.0"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="HF directory, .gguf file, hub id, a LoRA adapter's directory, or smollm2-135m")
    add("-o", "--output", metavar="DIR", required=True, help="engine directory to write")
    add_build_options(parser)
    add("--nodes", type=int, metavar="N", help="drafted tokens per step (default: the drafter's)")
    add("--tree", help="chain, static or dynamic (default: the drafter's)")
    add("--depth", type=int, metavar="D", help="levels of the tree")
    add("--top-k", type=int, metavar="K", help="most children per node, and nodes expanded per level of a dynamic tree")
    add("--tree-choices", metavar="FILE", help="JSON list of paths of a static tree, as [[0], [1], [0, 0]]")
    add("--learned-rows", type=int, metavar="N", help="of the table in which an n-gram drafter counts what the engine "
        f"writes, 128 bytes each; 0: it does not learn (default: {LEARNED_ROWS})")  # fmt: skip
    add("--device", help="cpu or cuda (default: cpu)")
    add("--backend", help="inductor (default), onnx, tensorrt or tensorrt-rtx")
    add("--prefill-chunk", type=int, metavar="C", help="most prompt tokens per prefill call (default: 512)")
    add("--compute-capability", nargs="+", metavar="X.Y", help="GPUs to build for, which need not be there: one "
        "with --device cuda, any number with tensorrt-rtx (default: the GPU at hand)")  # fmt: skip
    add("--sum-parts", type=int, metavar="R", help="compute rowwise layers as R parts, added in order: the bits of R "
        "ranks on one device (default: 1)")  # fmt: skip
    add("--tool-format", metavar="NAME", help="how the model writes calls of tools, as hermes or llama3 "
        "(docs/serving.md has all; default: as its chat template has it)")  # fmt: skip
    add("--ranks", type=int, metavar="R", help="share the model between R processes of this machine: tensor parallel, "
        "on a GPU each with --device cuda (default: 1)")  # fmt: skip
    add("--draft-ranks", type=int, metavar="R", help="how many ranks share a draft model: 1, each runs it whole, or as "
        "many as --ranks (default: 1)")  # fmt: skip
    add("--stats", action="store_true", help="print where the time of the build went, on standard error")
    add("--no-plugins", dest="plugins", action="store_false", default=None, help="TensorRT: its own layers only")
    add("--forced-acceptance", type=int, metavar="K", help="to measure speed: accept K drafts per step, right or wrong")


def run(options: argparse.Namespace) -> int:
    given = {
        name: value
        for name, value in vars(options).items()
        if value is not None and name not in ("run", "model", "output", "stats")
    }
    # Before OpenMP is loaded: on a busy machine its threads would spin at barriers, and take ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with needs_extra("build", "build"):
        from ..compile.build import build  # imports torch and transformers

    with Progress() as progress:
        build(options.model, options.output, progress=progress, **given)
    if options.stats:
        _print_stats(options.output)
    return 0


def _print_stats(directory: str) -> None:
    """A line for each stage of a build."""
    from ..runtime.engine_file import read_manifest

    seconds = read_manifest(directory).about["stage_s"]
    whole = sum(seconds.values())
    for name, spent in seconds.items():
        say(f"{name:<12}{spent:8.1f} s  {spent / whole:4.0%}", file=sys.stderr)
