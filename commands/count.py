"""`specstep count`."""

import argparse

from ..controls import LEARNED_ROWS
from ..errors import InputError, needs_extra
from .progress import Progress

HELP = "count n-gram tables for the ngram drafter"
EXAMPLES = """examples:
  specstep count dialogues.jsonl.gz -o tables.safetensors --model smollm2-135m
  specstep count answers.jsonl -o tables.safetensors --model ./Qwen3-0.6B
  specstep build ./Qwen3-0.6B -o engines/qwen --drafter tables.safetensors
  specstep count answers.jsonl -o learned.safetensors --model ./Qwen3-0.6B --learned"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    lines = 'JSON lines, plain or .gz, with "prompt" and "response", or "token_ids" as `generate --json` prints them'
    add("data", metavar="DATA", nargs="+", help=f"directories that `collect` wrote, or {lines}")
    add(
        "-o",
        "--output",
        metavar="TABLES",
        required=True,
        help="file to write, for `build --drafter TABLES`, or with --learned for `generate --learned`",
    )
    add("--model", metavar="MODEL", help="whose tokenizer reads the text, and for whom the tables are")
    add("--top", type=int, metavar="K", help="continuations kept per context (default: 8)")
    add("--min-count", type=int, metavar="N", help="occurrences that give two tokens a row (default: 3)")

    add("--learned", action="store_true", help="write what an engine would have learned by writing the data, which it "
        "starts from and goes on with")  # fmt: skip
    add("--learned-rows", type=int, metavar="N", default=LEARNED_ROWS, help="as of `build` (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    with needs_extra("build", "count"):
        from ..train.count import count, count_learned  # imports torch and transformers

    with Progress() as progress:
        if options.learned:
            if options.model is None:
                raise InputError("model: expected one beside --learned, got none; name the engine's model")
            if options.top is not None or options.min_count is not None:
                raise InputError("top, min-count: expected neither beside --learned, got one; they shape tables")
            count_learned(
                options.data, options.output, model=options.model, learned_rows=options.learned_rows, progress=progress
            )
        else:
            given = {name: getattr(options, name) for name in ("model", "top", "min_count")}
            given = {name: value for name, value in given.items() if value is not None}
            count(options.data, options.output, progress=progress, **given)
    return 0
