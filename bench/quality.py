"""How good low-bit weights are: perplexity, and greedy tokens that stay as they are in bf16; ours beside llama.cpp's.

    python bench/quality.py                                  # the default model on bench/quality_text.txt
    python bench/quality.py --text FILE.jsonl --tokens 30000 --out bench/results/quality
    python bench/quality.py --finer down_proj --finer 'layers\\.(0|29)\\.'   # int4, with the matching layers in int8

The same token ids go to all, in sequences that each start with no history, as every prompt begins; the model is told
every token, and what it thought of it is scored. Ours are transformers' own code with the packed weights and kernels of
an engine; llama.cpp's are GGUF files of the same dequantised weights, through its server. Differences are taken
token by token, so that their standard errors say what is noise.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from script import run_script

BENCH = Path(__file__).parent
OURS = {"float32": ("float32", "auto"), "bf16": ("bfloat16", "bfloat16"), "int8": ("bfloat16", "int8"),
        "int4": ("bfloat16", "int4"), "auto": ("bfloat16", "auto")}  # fmt: skip
PEERS = ("bf16", "q8_0", "q4_0", "own")  # own: the model's own GGUF file
PAIRS = (("int8", "q8_0"), ("int4", "q4_0"), ("auto", "own"))  # of about one size


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="as of `specstep build`; llama.cpp needs GGUF")
    parser.add_argument(
        "--text", type=Path, default=BENCH / "quality_text.txt", help='a text, or JSON lines with "turns" or "prompt"'
    )
    parser.add_argument("--tokens", type=int, default=100_000, help="at most so many, spread over the text")
    parser.add_argument("--length", type=int, default=512, help="most tokens of a sequence")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="variants with NAME in theirs")
    parser.add_argument(
        "--finer", action="append", default=[], metavar="REGEX", help="one more: int4, but int8 where a name has this"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--files", type=Path, default=BENCH.parent / "engines" / "bench", help="where GGUF files are converted to"
    )
    parser.add_argument(
        "--out", type=Path, default=BENCH / "results" / "quality", help="results, without .md and .json"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write -> exit status, see `run_script`."""
    given = parse(arguments)
    return run_script("quality", given.threads, lambda progress: run(given, progress))


def run(given: argparse.Namespace, progress: Any) -> None:
    """Measure what was asked for, print the table and write it beside the numbers."""
    from specstep.compile.source import load_tokenizer
    from specstep.errors import BuildError
    from teacher_forcing.sequences import read_sequences
    from teacher_forcing.table import conditions, numbers, table

    tokenizer, _ = load_tokenizer(given.model)
    if tokenizer is None:
        raise BuildError(f"model: expected one with a tokenizer, got none in {given.model}")
    sequences = read_sequences(given.text, tokenizer, given.length, given.tokens)
    progress(f"{sum(map(len, sequences)):,} tokens in {len(sequences)} sequences")
    measured = {**_ours(given, sequences, progress), **_peers(given, sequences, progress)}
    text = f"{table(measured, PAIRS)}\n{conditions(given, sequences)}\n"
    print(text)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.with_suffix(".md").write_text(text)
    given.out.with_suffix(".json").write_text(json.dumps(numbers(given, sequences, measured, PAIRS), indent=1) + "\n")


def _wanted(given: argparse.Namespace, name: str) -> bool:
    return not given.only or any(part in name for part in given.only)


def _ours(given: argparse.Namespace, sequences: Sequence[list[int]], progress: Any) -> dict[str, Any]:
    import torch
    from specstep.compile.source import load_source
    from teacher_forcing.ours import as_built, finer, measure

    torch.set_num_threads(given.threads)
    measured = {}
    for dtype in ("float32", "bfloat16"):
        wanted = {name: pair for name, pair in OURS.items() if _wanted(given, f"specstep {name}")}
        names = {name: weights for name, (its, weights) in wanted.items() if its == dtype}
        patterns = given.finer if dtype == "bfloat16" else []
        if not (names or patterns):
            continue
        source = load_source(given.model, dtype, "cpu")
        choices = {f"specstep {name}": as_built(source, dtype, weights) for name, weights in names.items()}
        choices |= {f"specstep int4, int8 in {pattern}": finer(source, pattern) for pattern in patterns}
        for name, choice in choices.items():
            progress(f"{name}: packs the weights")
            measured[name] = measure(source, choice, sequences, progress)
    return measured


def _peers(given: argparse.Namespace, sequences: Sequence[list[int]], progress: Any) -> dict[str, Any]:
    from side_by_side.engines import Settings, Skip
    from side_by_side.gguf_file import converted
    from specstep.compile.locate import gguf_file
    from teacher_forcing.llama_cpp_scores import check_installed, measure_file

    settings = Settings(given.model, given.threads, given.length, 1, (), given.files)
    measured = {}
    for name in PEERS:
        full = f"llama.cpp {name}"
        if not _wanted(given, full):
            continue
        try:
            check_installed()
            own = gguf_file(given.model) if name == "own" else None
            file = own or converted(name, settings, progress)
        except Skip as reason:
            progress(f"warning: {full} is left out: {reason}")
            continue
        progress(f"{full}: {len(sequences)} sequences")
        measured[full] = measure_file(file, sequences, given.threads, progress)
    return measured


if __name__ == "__main__":
    raise SystemExit(main())
