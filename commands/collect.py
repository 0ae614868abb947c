"""`specstep collect`."""

import argparse

from ..errors import needs_extra
from .progress import Progress

HELP = "collect what a model writes, to train drafters on"
EXAMPLES = """examples:
  specstep collect smollm2-135m -o data/own --tokens 2000000
  specstep collect smollm2-135m -o data/answers --prompts questions.jsonl --hidden-states
  specstep collect ./Qwen3-0.6B -o data/dialogues --prompts dialogues.jsonl.gz
  specstep collect ./Qwen3-0.6B -o data/documents --documents articles.jsonl

A run that was interrupted goes on when the same command is run again."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="HF directory, .gguf file, hub id, or smollm2-135m")
    add("-o", "--output", metavar="DATA", required=True, help="directory to write, or to add to")
    lines = (
        'JSON lines, plain or .gz: "prompt" is answered; "prompt" and "response", or "token_ids", are taken as they are'
    )
    add("--prompts", metavar="FILE", help=f"{lines} (default: the model asks itself)")
    text = 'JSON lines with "text": the model summarizes it, lists its points, answers a question about it, and so on'
    add("--documents", metavar="FILE", help=text)
    add("--tokens", type=int, metavar="N", help="stop at N tokens in all (default: all of FILE, or 1000000 of its own)")
    add(
        "--hidden-states",
        action="store_true",
        help="keep the target's hidden states too: (L + 1) * H * 2 bytes a token",
    )
    help_text = "answers take these in turn, 0 is greedy (default: 0; of its own questions 0 0 0 0.7 1)"
    add("--temperatures", type=float, nargs="+", metavar="T", help=help_text)
    add("--max-length", type=int, metavar="S", help="most tokens of a sequence (default: 1024)")
    add("--max-new-tokens", type=int, metavar="N", help="most tokens of an answer (default: 384)")
    add("--engine", metavar="DIR", help="engine to answer greedily with (default: DATA/engine, built if need be)")
    add("--seed", type=int, metavar="N", help="of questions and sampled answers (default: 0)")
    help_text = "bfloat16, float32 or float16 (default: bfloat16, and float32 for hidden states where that is quicker)"
    add("--dtype", help=help_text)
    add("--device", help="cpu or cuda (default: cpu)")


def run(options: argparse.Namespace) -> int:
    with needs_extra("build", "collect"):
        from ..train.collect.options import CollectOptions
        from ..train.collect.run import collect  # imports torch and transformers

    names = ("run", "model", "output")
    given = {name: value for name, value in vars(options).items() if value is not None and name not in names}
    if "temperatures" in given:
        given["temperatures"] = tuple(given["temperatures"])
    with Progress() as progress:
        collect(options.model, options.output, CollectOptions(**given), progress)
    return 0
