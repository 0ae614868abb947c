"""How good a KV cache of eight bits is: perplexity, and greedy tokens that stay as they are with one of bfloat16.

    python bench/cache_quality.py                                       # the default model, 200 and 2,000 tokens
    python bench/cache_quality.py --model DIR --text FILE.jsonl --lengths 500

The model is told every token, and what it thought of it is scored; a sequence starts with no history. Ours is the
traced model over the engine's caches. llama.cpp's, where its server is installed and the model is a GGUF file, is
that file with caches of float16 and of Q8_0, under flash attention, without which it has none of these.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from script import run_script

BENCH = Path(__file__).parent


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="as of `specstep build`")
    parser.add_argument("--text", type=Path, default=BENCH / "quality_text.txt", help="as for quality.py")
    parser.add_argument("--lengths", type=int, nargs="+", default=[200, 2000], help="tokens of a sequence")
    parser.add_argument("--tokens", type=int, default=20_000, help="at most so many of each length")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=BENCH / "results" / "cache_quality.json")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write -> exit status, see `run_script`."""
    given = parse(arguments)
    return run_script("cache_quality", given.threads, lambda progress: run(given, progress))


def run(given: argparse.Namespace, progress: Callable[[str], None]) -> None:
    """A line for each length and system, and the same as JSON."""
    import torch
    from specstep.compile.source import load_source
    from specstep.graphs.target import CausalLM
    from teacher_forcing.sequences import read_sequences

    torch.set_num_threads(given.threads)
    source = load_source(given.model, "bfloat16", "cpu")
    target, rows = CausalLM(source.model), []
    for length in given.lengths:
        sequences = list(read_sequences(given.text, source.tokenizer, length, given.tokens))
        progress(f"{sum(map(len, sequences)):,} tokens in {len(sequences)} sequences")
        for system, (plain, rounded) in _systems(
            given.model, source.model, target, sequences, given.threads, progress
        ).items():
            rows.append({"system": system, "length": length, **_compared(plain, rounded)})
            line = "{system}, {length} tokens: perplexity {perplexity:.4f} -> {of_int8:.4f} ({change:+.3%}"
            print((line + " +- {error:.3%}), {agreement:.2%} of greedy tokens").format(**rows[-1]))
    conditions = {"model": source.name, "text": given.text.name, "tokens": given.tokens}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(conditions | {"rows": rows}, indent=1) + "\n")


def _compared(plain: Any, rounded: Any) -> dict[str, float]:
    from teacher_forcing.scores import difference

    found = difference(rounded, plain)
    perplexities = {"perplexity": plain.perplexity, "of_int8": rounded.perplexity}
    return perplexities | {"change": found.change, "error": found.error, "agreement": found.agreement}


def _systems(
    name: str, model: Any, target: Any, sequences: Sequence[list[int]], threads: int, progress: Any
) -> dict[str, Any]:
    from specstep.compile.locate import gguf_file
    from teacher_forcing.llama_cpp_scores import llama_cpp_version, measure_file

    found = {"specstep": tuple(_ours(model, target, sequences, rounds, progress) for rounds in (False, True))}
    file = gguf_file(name)
    if file and llama_cpp_version():
        kinds = [{"cache-type-k": kind, "cache-type-v": kind, "flash-attn": "on"} for kind in ("f16", "q8_0")]
        found["llama.cpp"] = tuple(measure_file(file, sequences, threads, progress, **each).scores for each in kinds)
    return found


def _ours(model: Any, target: Any, sequences: Sequence[list[int]], rounds: bool, progress: Any) -> Any:
    """Scores of all sequences, each in one pass behind empty caches, which are read after they are written."""
    import torch
    from specstep.graphs.attention import chain_pass
    from specstep.graphs.kept import cache_layers
    from specstep.kernels.int8_rows import row_bytes
    from teacher_forcing.scores import joined, score

    model.set_attn_implementation("eager")
    layers, parts = cache_layers(model), []
    model.set_attn_implementation("specstep")
    dtype, width = (torch.int8, row_bytes) if rounds else (torch.bfloat16, int)
    for number, ids in enumerate(sequences):
        progress(f"{'int8' if rounds else 'bfloat16'}: sequence {number + 1} of {len(sequences)}")
        keys = [torch.zeros(1, layer.heads, len(ids), width(layer.key_size), dtype=dtype) for layer in layers]
        values = [torch.zeros(1, layer.heads, len(ids), width(layer.value_size), dtype=dtype) for layer in layers]
        where = chain_pass(torch.zeros(1, dtype=torch.int64), len(ids), len(ids))
        with torch.inference_mode():
            logits, _ = target(torch.tensor([ids]), where, keys, values)
        parts.append(score(logits[0], ids))
    return joined(parts)


if __name__ == "__main__":
    raise SystemExit(main())
