"""Our server beside llama.cpp's: tokens/s, time to the first text and between chunks at 1 to 16 clients.

    python bench/bench_serve.py
    python bench/bench_serve.py --only auto --only q4_0 --repeats 5
    python bench/bench_serve.py --model FILE.gguf --prompts FILE.jsonl

Engines, files and questions are those of `make bench`, with 16 rows; bench/README.md shows the last run.
"""

from collections.abc import Callable, Sequence

from script import run_script

from bench import parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write -> exit status, see `run_script`."""
    given = parse(arguments, __doc__)

    def run(progress: Callable[[str], None]) -> None:
        from side_by_side import parts  # loads OpenMP

        parts.run(given, progress, {"serve": parts.serve_part})

    return run_script("bench_serve", given.threads, run)


if __name__ == "__main__":
    raise SystemExit(main())
