"""`specstep tune`."""

import argparse
import json
from typing import Any

from ..errors import InputError, needs_extra
from .files import write
from .progress import Progress
from .prompts import LINES, Entry, read_prompts
from .terminal import say
from .tune_page import describe

HELP = "choose the fastest drafter and tree for a model on this machine, for `build` to use"
EXAMPLES = """examples:
  specstep tune smollm2-135m --png tuned.png
  specstep tune ./Qwen3-0.6B --drafter heads/qwen --prompts questions.jsonl -o tuned.json

It tries every drafter that fits the model on the prompts, without a build. Then it builds an engine for the one of
which most is accepted, and for another only if that could be faster, and times their steps by rows and nodes. What it
chose, `build` takes for this model, dtype and machine where none of --drafter, --tree, --nodes, --depth and --top-k is
given, or with --drafter auto. How many nodes are verified the engine chooses as it runs."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="HF directory, .gguf file, hub id, or smollm2-135m")
    add("-o", "--output", metavar="FILE", help="write the choice and what was measured as JSON")
    add("--png", metavar="FILE", help="draw what was measured (needs matplotlib, of the extra `plot`)")
    add("--drafter", metavar="NAME", action="append", help="try this one too, as in `build`; may be given again")
    add("--prompts", metavar="FILE", help=f"{LINES} (default: ten questions that come with the package)")
    add("--max-new-tokens", type=int, metavar="N", help="most new tokens per prompt (default: 128)")
    add("--max-batch", type=int, metavar="B", help="most rows to measure: 1, 2, 4, ... and B (default: 8)")
    add("--max-seq-len", type=int, metavar="S", help="of the engines (default: 2048)")
    add("--dtype", help="bfloat16, float32 or float16 (default: bfloat16)")
    add("--device", help="cpu or cuda (default: cpu)")
    add("--backend", help="inductor (default) or onnx")


def run(options: argparse.Namespace) -> int:
    if options.png:
        from .acceptance_plot import require_matplotlib

        require_matplotlib()
    names = ("max_new_tokens", "max_batch", "max_seq_len", "dtype", "device", "backend")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.prompts:
        given["prompts"] = [_usable(entry) for entry in read_prompts(options.prompts)]
    with needs_extra("build", "tune"):
        from ..train.tune.run import tune  # imports torch and transformers

    with Progress() as progress:
        result = tune(options.model, drafters=options.drafter or (), progress=progress, **given)
    say(describe(result))
    if options.output:
        write(options.output, json.dumps(result, indent=1) + "\n")
    if options.png:
        from .tune_plot import draw

        draw(options.png, result, options.model)
    return 0


def _usable(entry: Entry) -> Any:
    """The prompt of an entry. Raises InputError."""
    if isinstance(entry.prompt, InputError):
        raise entry.prompt
    if entry.chat_template_kwargs:
        raise InputError(
            f"prompt {entry.id}: chat_template_kwargs: expected none, got some; `tune` gives all "
            "prompts to the template in the same way"
        )
    return entry.prompt
