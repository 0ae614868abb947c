"""The results as Markdown, and as numbers for JSON."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from side_by_side.engines import CONTENDERS
from side_by_side.machine import machine, versions

from .llama_cpp_scores import llama_cpp_version
from .ours import Measured
from .scores import Difference, difference

Pairs = Sequence[tuple[str, str]]  # one of ours and one of llama.cpp's


def table(measured: Mapping[str, Measured], pairs: Pairs) -> str:
    """Each variant beside bf16 of the same family, then ours beside llama.cpp's of the same size."""
    lines = [
        "| weights | MB | perplexity | over bf16 | same greedy token as bf16 |",
        "|---|---|---|---|---|",
    ]
    for name, (scores, size) in measured.items():
        found = _beside_bf16(measured, name)
        cells = ["", ""] if found is None else [_change(found), f"{found.agreement:.1%}"]
        shown = name.replace("|", r"\|")  # a regular expression may hold it
        lines.append(f"| {' | '.join([shown, f'{size / 1e6:.1f}', f'{scores.perplexity:.3f}', *cells])} |")
    lines += [""] + [f"{ours} over {theirs}: {_change(apart)}." for ours, theirs, apart in _pairs(measured, pairs)]
    return "\n".join(lines) + "\n"


def conditions(given: argparse.Namespace, sequences: Sequence[list[int]]) -> str:
    """What was measured on what, as a sentence."""
    scored = sum(len(ids) - 1 for ids in sequences)
    return (
        f"{given.model}, {scored:,} tokens of {given.text.name} in {len(sequences)} sequences of at most "
        f"{given.length}; in brackets the standard error of the difference, token by token."
    )


def numbers(
    given: argparse.Namespace, sequences: Sequence[list[int]], measured: Mapping[str, Measured], pairs: Pairs
) -> dict[str, Any]:
    """Everything that the table says, and where it was measured."""
    variants = {}
    for name, (scores, size) in measured.items():
        found = _beside_bf16(measured, name)
        own = {"bytes": size, "perplexity": scores.perplexity, "mean_loss": float(scores.losses.mean())}
        variants[name] = own | ({} if found is None else {"over_bf16": found._asdict()})
    return {
        "model": given.model,
        "text": given.text.name,
        "tokens_scored": sum(len(ids) - 1 for ids in sequences),
        "sequences": len(sequences),
        "length": given.length,
        "machine": machine(),
        "versions": versions([one for one in CONTENDERS if one.family == "transformers"]) | llama_cpp_version(),
        "variants": variants,
        "pairs": {f"{ours} over {theirs}": apart._asdict() for ours, theirs, apart in _pairs(measured, pairs)},
    }


def _beside_bf16(measured: Mapping[str, Measured], name: str) -> Difference | None:
    bf16 = f"{name.split()[0]} bf16"
    return None if name == bf16 or bf16 not in measured else difference(measured[name].scores, measured[bf16].scores)


def _pairs(measured: Mapping[str, Measured], pairs: Pairs) -> Iterator[tuple[str, str, Difference]]:
    for own, peer in pairs:
        names = (f"specstep {own}", f"llama.cpp {peer}")
        if all(name in measured for name in names):
            yield *names, difference(*(measured[name].scores for name in names))


def _change(apart: Difference) -> str:
    return f"{apart.change:+.2%} ({apart.error:.2%})"
