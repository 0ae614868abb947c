"""The options of `build` that other commands take, too, where they are given a model and no engine."""

import argparse
from typing import Any

ENGINE = "engine directory, or a model as `build` takes it, whose engine is built on first use (`specstep cache`)"
DRAFTERS = (
    "none, ngram, default, auto (what `specstep tune` chose here, else what fits the model: what the package has, a "
    "head that lies beside it, n-grams that learn), mtp (a module in the model's own checkpoint), early-exit:N (the "
    "model's first N layers), module:factory, or paths of tables, a model, a published head; commas mix them"
)
NAMES = ("drafter", "adapter", "dtype", "weights", "kv_cache", "max_batch", "max_seq_len")


def add_build_options(parser: argparse._ActionsContainer) -> None:
    """Add them."""
    add = parser.add_argument
    add("--drafter", help=DRAFTERS)
    add("--adapter", metavar="DIR", help="LoRA adapter of PEFT, merged into MODEL")
    add("--dtype", help="bfloat16, float32 or float16 (default: bfloat16)")
    add("--weights", help="auto (default: as the model's file has them), bfloat16, int8 or int4 on a CPU; fp8 on a GPU")
    add("--kv-cache", help="auto (default: of --dtype) or int8, on a CPU: half the memory of bfloat16")
    add("--max-batch", type=int, metavar="B", help="rows that run at once (default: 1)")
    add("--max-seq-len", type=int, metavar="S", help="most tokens of a row, prompt included (default: 2048)")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add them as a group of their own."""
    add_build_options(parser.add_argument_group("options of a model, which make another engine each"))


def given_build(options: argparse.Namespace) -> dict[str, Any]:
    """What was given of them."""
    return {name: getattr(options, name) for name in NAMES if getattr(options, name) is not None}
