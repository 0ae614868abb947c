"""`specstep train-drafter`."""

import argparse

from ..errors import needs_extra
from .progress import Progress

HELP = "train a drafter for a model on text that the model wrote"
EXAMPLES = """examples:
  specstep train-drafter smollm2-135m dialogues.jsonl.gz -o heads/smol
  specstep collect ./Qwen3-0.6B -o data/qwen --tokens 20000000 --hidden-states
  specstep train-drafter ./Qwen3-0.6B data/qwen -o heads/qwen --device cuda --batch 32
  specstep train-drafter ./Qwen3-0.6B data/support -o heads/support --start heads/qwen --learning-rate 0.0012 --epochs 1
  specstep train-drafter ./Qwen3-0.6B data/qwen -o heads/all-at-once --kind p-eagle --start heads/qwen --layers 2
  specstep build ./Qwen3-0.6B -o engines/qwen --drafter heads/qwen"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="the target: HF directory, .gguf file, hub id, or smollm2-135m")
    add(
        "data", metavar="DATA", nargs="+", help="directories of `specstep collect`, or JSON lines as `count` takes them"
    )
    add("-o", "--output", metavar="DRAFTER", required=True, help="folder to write; an interrupted run there goes on")
    add(
        "--kind",
        metavar="KIND",
        help="eagle3: a head that drafts level after level; p-eagle: a head that drafts all in one pass; block: slots "
        "that attend to the text, and a table of bigrams (default: eagle3)",
    )
    add(
        "--start",
        metavar="DRAFTER",
        help="one of this kind to go on from, or an EAGLE-3 head for p-eagle; its sizes and vocabulary stay (default: "
        "a new one)",
    )
    add("--levels", type=int, metavar="L", help="that it is trained on, as deep as trees will be (default: 5)")
    add("--epochs", type=int, metavar="E", help="passes over the data (default: 3)")
    add("--draft-vocab-size", type=int, metavar="V", help="most frequent tokens that it can draft (default: 8192)")
    add("--layers", type=int, metavar="N", help="decoder layers of p-eagle and block (default: 1)")
    add("--intermediate-size", type=int, metavar="I", help="width of its MLPs (default: the model's)")
    add("--markov-rank", type=int, metavar="R", help="of a block drafter's bigrams, 0 for none (default: 64)")
    add("--batch", type=int, metavar="B", help="rows per update (default: 4)")
    add("--width", type=int, metavar="T", help="tokens per row (default: 512)")
    add("--learning-rate", type=float, metavar="R", help="at its highest (default: 0.006)")
    add("--held-out", type=float, metavar="P", help="share of the sequences to measure on (default: 0.01)")
    add("--evaluations", type=int, metavar="N", help="times to measure and save, evenly spread (default: 12)")
    add("--seed", type=int, metavar="S", help="of the order, the split and the start (default: 0)")
    add("--dtype", help="of the target: bfloat16, float32 or float16 (default: the quicker of the first two)")
    add("--device", help="cpu or cuda (default: cpu)")


def run(options: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(options).items() if value is not None}
    model, data, output, _ = (given.pop(name) for name in ("model", "data", "output", "run"))
    with needs_extra("build", "train-drafter"):
        from ..train.drafter.train import train_drafter  # imports torch and transformers

    with Progress() as progress:
        train_drafter(model, data, output, progress=progress, **given)
    return 0
