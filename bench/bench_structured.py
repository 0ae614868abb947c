"""What a grammar costs and brings: documents of JSON schemas, filled by an engine, and by llama.cpp's server beside it.

    python bench/bench_structured.py engines/smol
    python bench/bench_structured.py engines/smol --gguf model-q8_0.gguf     # llama.cpp, too: `make peers` compiles it

All are given the same prompts, greedily, in turn. Counted are tokens behind the prompt and seconds of their decoding.
The schemas are in side_by_side/schemas.jsonl. Text without a grammar is as long at most. Engines that learn from
documents are measured, too, each loaded anew, at the first of every schema.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from script import run_script, write_json

SCHEMAS = Path(__file__).parent / "side_by_side" / "schemas.jsonl"
OURS: dict[str, dict[str, bool]] = {  # name -> options of `ours`
    "specstep": {},
    "specstep, drafts as they come": {"fitted": False},
    "specstep, blanks fixed": {"fixed": True},
    "specstep, blanks fixed, drafts as they come": {"fitted": False, "fixed": True},
    "specstep, no grammar": {"held": False},
}
LEARNING = ("specstep", "specstep, drafts as they come")
PEER, PEER_FREE = "llama.cpp", "llama.cpp, no grammar"


class Written(NamedTuple):
    """Tokens behind the first, the seconds that they took, steps, and the text."""

    tokens: int
    seconds: float
    steps: int
    text: str


Writer = Callable[[list[int], Any], Written]


def ours(
    engine: Any, most: int, prompt: list[int], schema: Any, held: bool = True, fitted: bool = True, fixed: bool = False
) -> Written:
    """A document, or text that is not held by the schema. fitted: whether drafts are fitted to the grammar; fixed:
    whether the blanks of a document are."""
    form = {"json": schema, "disable_any_whitespace": fixed}
    request = engine.request(prompt, most, sampling={"structured": form if held else None})
    if not fitted:
        request.fit_tree = None
    for _ in engine.submit(request):
        pass
    result, stats = engine.result(request), request.stats
    return Written(len(result.token_ids), stats["decode_s"], stats["steps"], result.text)


def share(engine: Any, asked: list[Any], rows: int, most: int) -> float:
    """Seconds in which the step waits for grammars, to fit trees and for masks, over those of decoding; so many
    documents at a time."""
    spent = waited = 0.0

    def timed(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            nonlocal waited
            began = perf_counter()
            try:
                return hook(*given)
            finally:
                waited += perf_counter() - began

        return call

    for start in range(0, len(asked), rows):
        some = [asked[(start + row) % len(asked)] for row in range(rows)]
        requests = [engine.request(prompt, most, sampling={"structured": {"json": schema}}) for prompt, schema in some]
        for request in requests:
            request.fit_tree, request.allowed_tokens = timed(request.fit_tree), timed(request.allowed_tokens)
        for _ in engine.run(requests):
            pass
        spent += max(request.decode_s for request in requests)
    return waited / spent


def peer(server: Any, prompt: list[int], schema: Any, most: int) -> Written:
    """As `ours`, by llama.cpp's server, which counts from its first token on."""
    server.body = {"cache_prompt": False, **({"json_schema": schema} if schema else {})}
    result = server.complete(prompt, most)
    timings = result["timings"]
    return Written(timings["predicted_n"], timings["predicted_ms"] / 1e3, timings["predicted_n"], result["content"])


def measure(writers: dict[str, Writer], asked: list[Any], repeats: int) -> dict[str, Any]:
    """Every writer over all prompts, in turn -> of each tokens per second and per step, and how many of its documents
    keep their schema."""
    from jsonschema import Draft202012Validator

    speeds: dict[str, list[float]] = {name: [] for name in writers}
    last: dict[str, list[Written]] = {}
    for _ in range(repeats):
        for name, write in writers.items():
            last[name] = [write(prompt, schema) for prompt, schema in asked]
            speeds[name].append(sum(each.tokens for each in last[name]) / sum(each.seconds for each in last[name]))
    found = {}
    for name, written in last.items():
        whole = [
            _is_valid(Draft202012Validator(schema), each.text) for each, (_, schema) in zip(written, asked, strict=True)
        ]
        steps = sum(each.tokens for each in written) / sum(each.steps for each in written)
        found[name] = {"tokens_per_s": median(speeds[name]), "tokens_per_step": steps, "valid": sum(whole)}
    return found


def _is_valid(validator: Any, text: str) -> bool:
    try:
        return bool(validator.is_valid(json.loads(text)))
    except ValueError:  # cut at the limit
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print -> exit status, see `run_script`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", metavar="DIR", help="an engine")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the same model, for llama.cpp")
    parser.add_argument("--tokens", type=int, default=200, help="most tokens of a document (default: 200)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    given = parser.parse_args(arguments)

    def run(progress: Callable[[str], None]) -> None:
        import specstep

        with specstep.load(given.engine, progress=progress) as engine, _server(given, engine) as server:
            engine.learning = False  # every repetition is the first
            asked, writers = _asked(engine), _writers(engine, server, given.tokens)
            measure(writers, asked, 1)
            progress(f"measures {len(writers)} writers, {given.repeats} times each")
            found = measure(writers, asked, given.repeats)
            shares = {
                rows: share(engine, asked, rows, given.tokens) for rows in (1, 8) if rows <= engine.spec.max_batch
            }
        for name in LEARNING:
            with specstep.load(given.engine, progress=progress) as engine:
                write = partial(ours, engine, given.tokens, **OURS[name])
                found |= measure({f"{name}, learning": write}, _asked(engine), 1)
        if given.json:
            write_json(given.json, found | {"waits_for_grammars": shares})
        print(f"{'':44} tokens/s  per step  valid of {len(asked)}")
        for name, each in found.items():
            print(f"{name:44} {each['tokens_per_s']:8.1f} {each['tokens_per_step']:9.2f} {each['valid']:6}")
        for rows, part in shares.items():
            print(f"{rows} rows: {part:.1%} of decoding waits for grammars")

    return run_script("bench_structured", given.threads, run)


def _asked(engine: Any) -> list[Any]:
    """Prompts and schemas."""
    lines = [json.loads(line) for line in SCHEMAS.read_text().splitlines()]
    words = [[{"role": "user", "content": line["prompt"]}] for line in lines]
    return [(engine.tokenizer.encode_messages(each), line["schema"]) for each, line in zip(words, lines, strict=True)]


def _writers(engine: Any, server: Any, most: int) -> dict[str, Writer]:
    """Ours, and llama.cpp's where its server runs."""
    writers: dict[str, Writer] = {name: partial(ours, engine, most, **options) for name, options in OURS.items()}
    if server is not None:
        writers[PEER] = lambda prompt, schema: peer(server, prompt, schema, most)
        writers[PEER_FREE] = lambda prompt, schema: peer(server, prompt, None, most)
    return writers


@contextmanager
def _server(given: argparse.Namespace, engine: Any) -> Iterator[Any]:
    """llama.cpp's, of the file that was given; None where there is none."""
    if given.gguf is None:
        yield None
        return
    from subprocess import DEVNULL

    from side_by_side.engines import Contender, Settings
    from side_by_side.peer_llama_cpp import Runner

    settings = Settings(str(given.gguf), given.threads, engine.spec.max_seq_len, 1, (), given.gguf.parent)
    with closing(Runner(Contender("llama.cpp", "file", "none"), given.gguf, settings, DEVNULL)) as server:
        yield server


if __name__ == "__main__":
    raise SystemExit(main())
