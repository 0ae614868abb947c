"""`make bench`: our engines beside their peers on the same questions, and what a step costs.

    make bench                                              # everything, on the default model and the questions here
    make bench ARGS=--quick                                 # eight questions, fewer kinds of steps
    make bench ARGS="--only llama.cpp --only 'bf16 default'"    # engines whose name has one of these in it
    make bench MODEL=FILE.gguf PROMPTS=FILE.jsonl ARGS="--questions 24"
    make bench ARGS="--only 'auto learned' --lessons 12"    # drafts learned from 12 answers to other questions

Engines are built and files converted once, under engines/bench. Each engine is a process that loads once; the questions
go to one engine after the other. bench/README.md says what is measured and how to read it.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from script import run_script

BENCH = Path(__file__).parent


def parse(arguments: Sequence[str] | None, description: str | None = __doc__) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="smollm2-135m", help="as of `specstep build`; peers but transformers need GGUF"
    )
    parser.add_argument(
        "--prompts", type=Path, help="JSON lines as of `specstep generate`; default: 18 questions of its own"
    )
    parser.add_argument("--questions", type=int, help="how many, each category in turn; default: 18, quick 8")
    parser.add_argument(
        "--lessons",
        type=int,
        default=0,
        help="further questions, the first ones, that nobody measures: what `learned` engines learn from",
    )
    parser.add_argument("--quick", action="store_true", help="fewer questions and kinds of steps")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="engines, or `steps`, or `batches`")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--engines", type=Path, default=BENCH.parent / "engines" / "bench", help="where built engines are"
    )
    parser.add_argument("--out", type=Path, default=BENCH / "results", help="where results go")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write -> exit status, see `run_script`."""
    given = parse(arguments)

    def run(progress: Callable[[str], None]) -> None:
        from side_by_side import parts  # loads OpenMP

        parts.run(given, progress, parts.PARTS)

    return run_script("bench", given.threads, run)


if __name__ == "__main__":
    raise SystemExit(main())
