"""Documents of MaskBench's schemas, written by an engine: whether they keep their schemas, and what drafts bring.

    git clone https://github.com/guidance-ai/jsonschemabench
    python bench/maskbench.py engines/smol jsonschemabench/maskbench/data --count 500

A schema is asked for in words that quote it. A document that ends on its own is held to its schema by `jsonschema`; one
that is cut proves nothing. Each schema is written for once with drafts that are fitted to its grammar and once with
those that come, by engines of their own, which learn: so the ratio is that of a server's first requests. Documents that
are cut, many of which repeat themselves, are counted apart.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench_structured import Written, ours
from script import run_script, write_json

ASKS = "Write an example document as JSON that keeps this JSON schema:\n"
LONGEST = 1200  # tokens of a prompt


def holds(schema: Any, written: Written) -> str:
    """What a document is: cut, valid, invalid, or one whose schema `jsonschema` cannot check."""
    from jsonschema import validators

    try:
        document = json.loads(written.text)
    except ValueError:
        return "cut"
    try:
        checker = validators.validator_for(schema)
        return "valid" if checker(schema).is_valid(document) else "invalid"
    except Exception:  # a reference to elsewhere, an expression of another dialect
        return "unchecked"


def chosen(folder: Path, count: int, seed: int) -> list[tuple[str, Any]]:
    """So many schemas at random, with their names."""
    files = sorted(folder.glob("*.json"))
    random.Random(seed).shuffle(files)
    return [(file.stem, json.loads(file.read_text())["schema"]) for file in files[:count]]


def measure(directory: str, schemas: list[tuple[str, Any]], most: int, progress: Callable[[str], None]) -> Any:
    """Write a document for each schema in both ways -> counts, and names of schemas whose document is invalid."""
    import specstep

    kinds, wrong, refused = Counter[str](), list[str](), list[str]()
    tokens, steps, seconds = Counter[str](), Counter[str](), Counter[str]()
    with specstep.load(directory) as fitting, specstep.load(directory) as plain:
        for number, (name, schema) in enumerate(schemas):
            prompt = fitting.tokenizer.encode_messages([{"role": "user", "content": ASKS + json.dumps(schema)}])
            if len(prompt) > LONGEST:
                kinds["too long"] += 1
                continue
            try:
                found = {"fitted": ours(fitting, most, prompt, schema)}
                found["as they come"] = ours(plain, most, prompt, schema, fitted=False)
            except specstep.SpecstepError as error:
                refused.append(f"{name}: {error}")
                continue
            if found["fitted"].text != found["as they come"].text:
                raise AssertionError(f"{name}: two texts")
            kind = holds(schema, found["fitted"])
            kinds[kind] += 1
            for way, written in found.items():
                of_kind = f"{way}, cut" if kind == "cut" else way
                tokens[of_kind] += written.tokens
                steps[of_kind] += written.steps
                seconds[of_kind] += written.seconds
            wrong += [name] if kind == "invalid" else []
            if number % 50 == 49:
                progress(f"{number + 1} schemas, {dict(kinds)}, {len(refused)} refused")
    ways = {
        way: {"tokens_per_step": tokens[way] / steps[way], "tokens_per_s": tokens[way] / seconds[way]} for way in tokens
    }
    return {"documents": dict(kinds), "invalid": wrong, "refused": refused, "ways": ways}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print -> exit status, see `run_script`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", metavar="DIR", help="an engine")
    parser.add_argument("data", type=Path, metavar="DATA", help="the folder of MaskBench's schemas")
    parser.add_argument("--count", type=int, default=200, help="schemas (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=300, help="most tokens of a document (default: 300)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    given = parser.parse_args(arguments)

    def run(progress: Callable[[str], None]) -> None:
        found = measure(given.engine, chosen(given.data, given.count, given.seed), given.tokens, progress)
        if given.json:
            write_json(given.json, found)
        print(f"documents: {found['documents']}, refused: {len(found['refused'])}")
        for name in found["invalid"]:
            print(f"invalid: {name}")
        for way, each in found["ways"].items():
            print(f"{way:20} {each['tokens_per_step']:.2f} tokens per step, {each['tokens_per_s']:.0f} tokens/s")

    return run_script("maskbench", given.threads, run)


if __name__ == "__main__":
    raise SystemExit(main())
