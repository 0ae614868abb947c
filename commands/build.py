"""`specstep build`."""

import argparse
import os

from ..controls import LEARNED_ROWS
from ..errors import needs_extra
from .progress import Progress

HELP = "compile a model and a drafter into an engine directory"
EXAMPLES = """examples:
  specstep build smollm2-135m -o engines/smol
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
    add("--adapter", metavar="DIR", help="LoRA adapter of PEFT, merged into MODEL")
    add("-o", "--output", metavar="DIR", required=True, help="engine directory to write")
    add("--drafter", help="none, ngram, default, auto (what `specstep tune` chose here, else what fits the "
        "model: what the package has, a head that lies beside it, n-grams that learn), module:factory, or paths of "
        "tables, a model, a head; commas mix them")  # fmt: skip
    add("--nodes", type=int, metavar="N", help="drafted tokens per step (default: the drafter's)")
    add("--tree", help="chain, static or dynamic (default: the drafter's)")
    add("--depth", type=int, metavar="D", help="levels of the tree")
    add("--top-k", type=int, metavar="K", help="most children per node, and nodes expanded per level of a dynamic tree")
    add("--tree-choices", metavar="FILE", help="JSON list of paths of a static tree, as [[0], [1], [0, 0]]")
    add("--learned-rows", type=int, metavar="N", help="of the table in which an n-gram drafter counts what the engine "
        f"writes, 128 bytes each; 0: it does not learn (default: {LEARNED_ROWS})")  # fmt: skip
    add("--dtype", help="bfloat16, float32 or float16 (default: bfloat16)")
    add("--weights", help="auto (default: as the model's file has them), bfloat16, int8 or int4 on a CPU; fp8 on a GPU")
    add("--device", help="cpu or cuda (default: cpu)")
    add("--backend", help="inductor (default), onnx, tensorrt or tensorrt-rtx")
    add("--max-batch", type=int, metavar="B", help="rows that run at once (default: 1)")
    add("--max-seq-len", type=int, metavar="S", help="most tokens of a row, prompt included (default: 2048)")
    add("--prefill-chunk", type=int, metavar="C", help="most prompt tokens per prefill call (default: 512)")
    add("--compute-capability", nargs="+", metavar="X.Y", help="GPUs to build for, which need not be there: one "
        "with --device cuda, any number with tensorrt-rtx (default: the GPU at hand)")  # fmt: skip
    add("--no-plugins", dest="plugins", action="store_false", default=None, help="TensorRT: its own layers only")
    add("--forced-acceptance", type=int, metavar="K", help="to measure speed: accept K drafts per step, right or wrong")


def run(options: argparse.Namespace) -> int:
    given = {
        name: value
        for name, value in vars(options).items()
        if value is not None and name not in ("run", "model", "output")
    }
    # Before OpenMP is loaded: on a busy machine its threads would spin at barriers, and take ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with needs_extra("build", "build"):
        from ..compile.build import build  # imports torch and transformers

    with Progress() as report:
        build(options.model, options.output, report=report, **given)
    return 0
