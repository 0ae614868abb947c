"""`specstep generate`."""

import argparse
import json
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .conversation import add_template_options, given_arguments, with_system
from .prompts import LINES, Entry, make_requests, read_prompts
from .stats import speed

if TYPE_CHECKING:
    from ..runtime.engine import Engine
    from ..runtime.request import Request

HELP = "generate text with an engine"
EXAMPLES = """examples:
  specstep generate engines/smol --prompt "Why is the sky blue?" --stats
  specstep generate engines/smol --prompts questions.jsonl --json --max-new-tokens 256
  echo "Once upon a time" | specstep generate engines/smol --raw"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("engine", metavar="DIR", help="engine directory")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="one prompt (default: standard input)")
    source.add_argument("--prompts", metavar="FILE", help=LINES)
    add(
        "--max-new-tokens", type=int, metavar="N", help="most new tokens per prompt (default: up to the engine's limit)"
    )
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--chat", action="store_true", help="use the chat template (default where the model has one)")
    style.add_argument("--raw", action="store_true", help="give the prompt to the model as it is")
    add_template_options(parser)
    add("--ignore-eos", action="store_true", help="go on past end-of-sequence tokens")
    add("--json", action="store_true", help="print one JSON line per prompt")
    add("--stats", action="store_true", help="print speed and acceptance on standard error")


def run(options: argparse.Namespace) -> int:
    arguments = given_arguments(options)
    if options.raw and (arguments or options.system is not None):
        raise InputError("raw: expected no --system and no --template-arg beside it, got one; they need the template")
    if options.prompts is None:
        entries = [Entry(0, options.prompt if options.prompt is not None else sys.stdin.read().rstrip("\n"))]
    else:
        entries = read_prompts(options.prompts)
    from ..runtime.engine import load

    engine = load(options.engine)
    chat = options.chat or (engine.has_chat_template and not options.raw)
    entries = [entry._replace(prompt=with_system(entry.prompt, options.system)) for entry in entries]
    made = make_requests(
        engine,
        entries,
        options.max_new_tokens,
        chat=chat,
        ignore_eos=options.ignore_eos,
        chat_template_kwargs=arguments,
    )
    requests = [(entry.id, request) for entry, request in made]
    started = time.perf_counter()
    if options.prompts is None and not options.json:
        _print_stream(engine, requests)
    else:
        _print_results(engine, requests, options.json)
    if options.stats and requests:
        _print_stats([request for _, request in requests], time.perf_counter() - started)
    return 2 if len(requests) < len(entries) else 0


def _print_stream(engine: "Engine", requests: list[tuple[Any, "Request"]]) -> None:
    """Print the text of one request as it comes."""
    for _, request in requests:
        for piece in engine.submit(request):
            print(piece.text, end="", flush=True)
        print()


def _print_results(engine: "Engine", requests: list[tuple[Any, "Request"]], as_json: bool) -> None:
    """Print each result when it and all before it are done."""
    printed = 0
    for _ in engine.run([request for _, request in requests]):
        while printed < len(requests) and requests[printed][1].finish_reason:
            name, request = requests[printed]
            result = engine.result(request)
            printed += 1
            fields = {
                key: getattr(result, key) for key in ("prompt_token_ids", "token_ids", "text", "finish_reason", "stats")
            }
            print(json.dumps({"id": name} | fields) if as_json else f"[{name}] {result.text}", flush=True)


def _print_stats(requests: list["Request"], seconds: float) -> None:
    """Speed over the whole run, prefill and queue included; seconds: what it took."""
    print(speed(requests, seconds), file=sys.stderr)
    steps = sum(request.steps for request in requests)
    histogram = sum((request.accepted for request in requests), Counter())
    for depth in range(max(histogram) + 1):
        share = histogram[depth] / steps
        print(f"  {depth:3} accepted {'█' * round(40 * share):<40} {share:6.1%}", file=sys.stderr)
