"""`specstep generate`."""

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import InputError
from .build_options import ENGINE, add_model_options, given_build
from .conversation import add_template_options, given_arguments, with_system
from .device_option import add_device_option
from .files import read
from .learning_options import add_learning_options, given_learning
from .nodes_option import add_nodes_option, given_nodes
from .progress import Progress
from .prompts import BOM, LINES, Entry, make_requests, read_prompts
from .sampling_options import GivenSampling, add_sampling_options, given_sampling
from .stats import speed, verified
from .terminal import say

if TYPE_CHECKING:
    from ..runtime.asked.request import Request
    from ..runtime.engine import Engine
    from ..runtime.stream import Generation

HELP = "generate text with an engine, or a model"
EXAMPLES = """examples:
  specstep generate smollm2-135m --prompt "Why is the sky blue?"      # builds the engine first, once
  specstep generate engines/smol --prompt "Why is the sky blue?" --stats
  specstep generate engines/smol --prompts questions.jsonl --json --max-new-tokens 256
  specstep generate engines/smol --prompt "Name a colour." --temperature 0.8 --top-p 0.95 --seed 1 --n 3
  echo "Once upon a time" | specstep generate engines/smol --raw"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("engine", metavar="ENGINE", help=ENGINE)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="one prompt (default: standard input)")
    source.add_argument("--prompts", metavar="FILE", help=LINES)
    add(
        "--max-new-tokens", type=int, metavar="N", help="most new tokens per prompt (default: up to the engine's limit)"
    )
    add("--prediction", metavar="FILE", help="text that the answer will probably repeat, as a file that it edits")
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--chat", action="store_true", help="use the chat template (default where the model has one)")
    style.add_argument("--raw", action="store_true", help="give the prompt to the model as it is")
    add_template_options(parser)
    add("--ignore-eos", action="store_true", help="go on past end-of-sequence tokens")
    add(
        "--forced-acceptance",
        action="store_true",
        help="run an engine that accepts drafts right or wrong, for its speed",
    )
    add_nodes_option(parser)
    add_device_option(parser)
    add("--json", action="store_true", help="print one JSON line per text")
    add("--stats", action="store_true", help="print speed and acceptance on standard error")
    add_learning_options(parser)
    add_sampling_options(parser, choices=True)
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    arguments, sampling = given_arguments(options), given_sampling(options)
    if options.raw and (arguments or options.system is not None):
        raise InputError("raw: expected no --system and no --template-arg beside it, got one; they need the template")
    if options.logprobs is not None and not options.json:
        raise InputError("logprobs: expected --json beside it, got none")
    if options.prompts is not None and options.prediction is not None:
        raise InputError("prediction: expected none beside --prompts, whose lines have their own, got one")
    if options.prompts is None:
        prompt = options.prompt if options.prompt is not None else _standard_input()
        likely = None if options.prediction is None else read("prediction", options.prediction)
        entries = [Entry(0, prompt, prediction=likely)]
    else:
        entries = read_prompts(options.prompts)
    from ..model_engines import engine_of
    from ..runtime.load import load

    with Progress() as progress:
        how: dict[str, Any] = {"nodes": given_nodes(options), "device": options.device, "progress": progress}
        directory = engine_of(options.engine, progress, given_build(options), device=options.device)
        engine = load(directory, **how, **given_learning(options))
    with engine:
        return _generate(engine, entries, options, arguments, sampling)


def _standard_input() -> str:
    """All of it, without the last line ends. Raises InputError."""
    try:
        return sys.stdin.read().removeprefix(BOM).rstrip("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"prompt: expected text in {error.encoding} on standard input, got other bytes") from None


def _generate(
    engine: "Engine",
    entries: list[Entry],
    options: argparse.Namespace,
    arguments: dict[str, Any] | None,
    sampling: GivenSampling,
) -> int:
    """Print what an engine writes -> exit status: 2 where a prompt could not be answered."""
    sampling.tell(engine)
    chat = options.chat or (engine.has_chat_template and not options.raw)
    entries = [entry._replace(prompt=with_system(entry.prompt, options.system)) for entry in entries]
    made = make_requests(
        engine,
        entries,
        options.max_new_tokens,
        chat=chat,
        ignore_eos=options.ignore_eos,
        chat_template_kwargs=arguments,
        sampling=sampling,
        forced_acceptance=options.forced_acceptance,
    )
    texts = [Text(entry.id, request, at, len(choices)) for entry, choices in made for at, request in enumerate(choices)]
    started = time.perf_counter()
    if options.prompts is None and not options.json and len(texts) == 1:
        _print_stream(engine, texts[0].request)
    else:
        _print_results(engine, texts, options.json)
    if options.stats and texts:
        _print_stats([text.request for text in texts], time.perf_counter() - started)
    return 2 if len(made) < len(entries) else 0


class Text(NamedTuple):
    """One of `of` texts that a prompt gets."""

    name: Any
    request: "Request"
    choice: int
    of: int


def _print_stream(engine: "Engine", request: "Request") -> None:
    """Print the text of a request as it comes."""
    for piece in engine.submit(request):
        say(piece.text, end="")
    say("")


def _print_results(engine: "Engine", texts: list[Text], as_json: bool) -> None:
    """Print each text when it and all before it are done."""
    printed = 0
    for _ in engine.run([text.request for text in texts]):
        while printed < len(texts) and texts[printed].request.finish_reason:
            text = texts[printed]
            result = engine.result(text.request)
            printed += 1
            choice = f", choice {text.choice}" if text.of > 1 else ""
            say(json.dumps(_fields(text, result)) if as_json else f"[{text.name}{choice}] {result.text}")


def _fields(text: Text, result: "Generation") -> dict[str, Any]:
    """A line of JSON: `choice`, `seed`, `channels` and `logprobs` where there is something to say."""
    keys = ("prompt_token_ids", "token_ids", "text", "finish_reason", "stats")
    fields = {"id": text.name} | {key: getattr(result, key) for key in keys}
    if text.of > 1:
        fields["choice"] = text.choice
    if result.seed is not None:
        fields["seed"] = result.seed
    if result.channels:
        fields["channels"] = [dataclasses.asdict(message) for message in result.channels]
    if result.logprobs is not None:
        fields["logprobs"] = [
            each._asdict() | {"top": [{"token_id": token, "logprob": value} for token, value in each.top]}
            for each in result.logprobs
        ]
    return fields


def _print_stats(requests: list["Request"], seconds: float) -> None:
    """Speed over the whole run, prefill and queue included; seconds: what it took."""
    say(speed(requests, seconds), file=sys.stderr)
    steps = sum(request.steps for request in requests)
    histogram = sum((request.accepted for request in requests), Counter())
    for depth in range(max(histogram) + 1):
        share = histogram[depth] / steps
        say(f"  {depth:3} accepted {'█' * round(40 * share):<40} {share:6.1%}", file=sys.stderr)
    say(verified(requests), file=sys.stderr)
