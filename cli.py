"""The command line: `specstep build`, `generate`, `count`, `inspect`."""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .runtime.errors import InputError, SpecstepError

if TYPE_CHECKING:
    from .runtime.engine import Engine
    from .runtime.generate import Request

EXAMPLES = {
    "build": """examples:
  specstep build smollm2-135m -o engines/smol
  specstep build ./Qwen3-0.6B -o engines/qwen --dtype bfloat16 --max-seq-len 4096 --max-batch 4
  specstep build ./big -o engines/big --drafter ./small --nodes 5""",
    "generate": """examples:
  specstep generate engines/smol --prompt "Why is the sky blue?" --stats
  specstep generate engines/smol --prompts questions.jsonl --json --max-new-tokens 256
  echo "Once upon a time" | specstep generate engines/smol --raw""",
    "count": """examples:
  specstep count dialogues.jsonl.gz -o tables.safetensors --model smollm2-135m
  specstep count answers.jsonl -o tables.safetensors --model ./Qwen3-0.6B
  specstep build ./Qwen3-0.6B -o engines/qwen --drafter tables.safetensors""",
    "inspect": """examples:
  specstep inspect engines/smol
  specstep inspect engines/smol --svg step.svg""",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command -> exit status: 0, or 2 for bad input (one line on standard error says which)."""
    options = parser().parse_args(arguments)
    try:
        return options.run(options)
    except SpecstepError as error:
        print(f"specstep: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader went away, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("specstep: interrupted", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """The whole grammar of the command line."""
    whole = argparse.ArgumentParser(prog="specstep", description="Speculative decoding as a compiled artifact.")
    commands = whole.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        formatter = argparse.RawDescriptionHelpFormatter
        added = commands.add_parser(name, help=text, description=text, epilog=EXAMPLES[name], formatter_class=formatter)
        added.set_defaults(run=run)
        return added

    _build_options(command("build", _build, "compile a model and a drafter into an engine directory"))
    _generate_options(command("generate", _generate, "generate text with an engine"))
    _count_options(command("count", _count, "count n-gram tables for the ngram drafter"))
    inspect = command("inspect", _inspect, "show what an engine is made of")
    inspect.add_argument("engine", metavar="DIR", help="engine directory")
    inspect.add_argument("--json", action="store_true", help="print the manifest")
    inspect.add_argument("--svg", metavar="FILE", help="draw the tree and the step's stages")
    return whole


def _build_options(build: argparse.ArgumentParser) -> None:
    add = build.add_argument
    add("model", metavar="MODEL", help="HF directory, .gguf file, hub id, or smollm2-135m")
    add("-o", "--output", metavar="DIR", required=True, help="engine directory to write")
    add("--drafter", help="none, ngram, default, or a path: count tables, a smaller model, a head (default: default)")
    add("--nodes", type=int, metavar="N", help="drafted tokens per step (default: the drafter's)")
    add("--tree", help="chain, static or dynamic (default: the drafter's)")
    add("--depth", type=int, metavar="D", help="levels of the tree")
    add("--top-k", type=int, metavar="K", help="most children per node, and nodes expanded per level of a dynamic tree")
    add("--tree-choices", metavar="FILE", help="JSON list of paths of a static tree, as [[0], [1], [0, 0]]")
    add("--dtype", help="bfloat16, float32 or float16 (default: bfloat16)")
    add("--device", help="cpu or cuda (default: cpu)")
    add("--backend", help="inductor (default)")
    add("--max-batch", type=int, metavar="B", help="rows that run at once (default: 1)")
    add("--max-seq-len", type=int, metavar="S", help="most tokens of a row, prompt included (default: 2048)")
    add("--prefill-chunk", type=int, metavar="C", help="most prompt tokens per prefill call (default: 512)")


def _generate_options(generate: argparse.ArgumentParser) -> None:
    add = generate.add_argument
    add("engine", metavar="DIR", help="engine directory")
    source = generate.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="one prompt (default: standard input)")
    source.add_argument("--prompts", metavar="FILE", help='JSON lines with "id" and "prompt" or "token_ids"')
    add(
        "--max-new-tokens", type=int, metavar="N", help="most new tokens per prompt (default: up to the engine's limit)"
    )
    style = generate.add_mutually_exclusive_group()
    style.add_argument("--chat", action="store_true", help="use the chat template (default where the model has one)")
    style.add_argument("--raw", action="store_true", help="give the prompt to the model as it is")
    add("--ignore-eos", action="store_true", help="go on past end-of-sequence tokens")
    add("--json", action="store_true", help="print one JSON line per prompt")
    add("--stats", action="store_true", help="print speed and acceptance on standard error")


def _count_options(count: argparse.ArgumentParser) -> None:
    add = count.add_argument
    text = 'JSON lines, plain or .gz, with "prompt" and "response", or "token_ids" as `generate --json` prints them'
    add("data", metavar="DATA", nargs="+", help=text)
    add("-o", "--output", metavar="TABLES", required=True, help="file to write, for `build --drafter TABLES`")
    add("--model", metavar="MODEL", help="whose tokenizer reads the text, and for whom the tables are")
    add("--top", type=int, metavar="K", default=8, help="continuations kept per context (default: 8)")
    add("--min-count", type=int, metavar="N", default=3, help="occurrences that give two tokens a row (default: 3)")


def _count(options: argparse.Namespace) -> int:
    from .train.count import count  # imports torch and transformers

    given = {name: getattr(options, name) for name in ("model", "top", "min_count")}
    count(options.data, options.output, report=lambda line: print(f"specstep: {line}", file=sys.stderr), **given)
    return 0


def _build(options: argparse.Namespace) -> int:
    given = {
        name: value
        for name, value in vars(options).items()
        if value is not None and name not in ("run", "model", "output")
    }
    from .compile.build import build  # imports torch and transformers

    build(options.model, options.output, report=lambda line: print(f"specstep: {line}", file=sys.stderr), **given)
    return 0


def _generate(options: argparse.Namespace) -> int:
    entries = _entries(options)
    from .runtime.engine import load

    engine = load(options.engine)
    chat = options.chat or not (options.raw or engine.text is None or engine.text.chat_template is None)
    requests: list[tuple[Any, Request]] = []
    failures = 0
    for name, prompt in entries:
        try:
            if isinstance(prompt, SpecstepError):
                raise prompt
            request = engine.request(
                prompt, options.max_new_tokens, chat=chat, ignore_eos=options.ignore_eos, name=f"prompt {name}"
            )
            requests.append((name, request))
        except InputError as error:  # the other prompts still run
            failures += 1
            print(f"specstep: {error}", file=sys.stderr)
    if options.prompts is None and not options.json:
        _print_stream(engine, requests)
    else:
        _print_results(engine, requests, options.json)
    if options.stats and requests:
        _print_stats([request for _, request in requests])
    return 2 if failures else 0


def _entries(options: argparse.Namespace) -> list[tuple[Any, Any]]:
    """(id, prompt) pairs; an InputError in place of a prompt that cannot be read."""
    if options.prompts is None:
        return [(0, options.prompt if options.prompt is not None else sys.stdin.read().rstrip("\n"))]
    try:
        lines = Path(options.prompts).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prompts: expected a readable file of JSON lines, got {options.prompts}: {error}") from None
    return [_entry(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _entry(number: int, line: str) -> tuple[Any, Any]:
    place = f"prompts: line {number}"
    try:
        entry = json.loads(line)
    except ValueError as error:
        return number, InputError(f"{place}: expected a JSON object, got {error}")
    if not isinstance(entry, dict) or "id" not in entry:
        return number, InputError(f'{place}: expected an object with "id", got {line[:60]}')
    text, tokens = entry.get("prompt"), entry.get("token_ids")
    if isinstance(text, str) and tokens is None:
        return entry["id"], text
    if isinstance(tokens, list) and text is None:
        return entry["id"], tokens
    return entry["id"], InputError(f'{place}: expected "prompt" (text) or "token_ids" (a list), got {sorted(entry)}')


def _print_stream(engine: "Engine", requests: list[tuple[Any, "Request"]]) -> None:
    """Print the text of one request as it comes."""
    from .runtime.generate import run
    from .runtime.text import TextStream

    for _, request in requests:
        pieces = TextStream(engine.tokenizer)
        for _, tokens in run(engine.session, [request]):
            print(pieces.push(tokens, last=request.finish_reason is not None), end="", flush=True)
        print()


def _print_results(engine: "Engine", requests: list[tuple[Any, "Request"]], as_json: bool) -> None:
    """Print each result when it and all before it are done."""
    from .runtime.generate import run

    printed = 0
    for _ in run(engine.session, [request for _, request in requests]):
        while printed < len(requests) and requests[printed][1].finish_reason:
            name, request = requests[printed]
            result = engine.result(request)
            printed += 1
            fields = {
                key: getattr(result, key) for key in ("prompt_token_ids", "token_ids", "text", "finish_reason", "stats")
            }
            print(json.dumps({"id": name} | fields) if as_json else f"[{name}] {result.text}", flush=True)


def _print_stats(requests: list["Request"]) -> None:
    tokens, steps = sum(len(r.tokens) for r in requests), sum(r.steps for r in requests)
    seconds = sum(r.decode_s for r in requests)
    first = sorted(r.first_token_s for r in requests)[len(requests) // 2]
    print(
        f"{tokens} tokens in {seconds:.2f} s: {tokens / max(seconds, 1e-9):.1f} tokens/s, "
        f"{tokens / max(steps, 1):.2f} tokens per step, time to first token {first * 1000:.0f} ms",
        file=sys.stderr,
    )
    histogram = sum((request.accepted for request in requests), Counter())
    for depth in range(max(histogram) + 1):
        share = histogram[depth] / steps
        print(f"  {depth:3} accepted {'█' * round(40 * share):<40} {share:6.1%}", file=sys.stderr)


def _inspect(options: argparse.Namespace) -> int:
    from .runtime.engine_file import check_files, read_manifest
    from .runtime.inspect import describe
    from .runtime.svg import draw

    manifest = read_manifest(options.engine)
    check_files(Path(options.engine), manifest, deep=False)
    print(manifest.to_json() if options.json else describe(manifest))
    if options.svg:
        try:
            Path(options.svg).write_text(draw(manifest.about["tree"], manifest.about["stages"]))
        except OSError as error:
            raise InputError(f"svg: expected a path that can be written, got {options.svg}: {error.strerror}") from None
    return 0
