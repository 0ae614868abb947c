"""`specstep serve`."""

import argparse
import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import EXIT_BROKEN, InputError, needs_extra
from .build_options import ENGINE, add_model_options, given_build
from .device_option import add_device_option
from .learning_options import add_learning_options, given_learning
from .nodes_option import add_nodes_option, given_nodes
from .progress import Progress
from .terminal import complain, say

if TYPE_CHECKING:
    from ..serving.options import ServeOptions

HELP = "serve engines over HTTP, with the API of OpenAI"
ENVIRONMENT = "SPECSTEP_API_KEY"
ROWS = 8  # of an engine that is built for a server
OPEN = "specstep: warning: {} without an API key: whoever reaches it can use it"
EXAMPLES = f"""examples:
  specstep serve smollm2-135m                    # builds the engine first, once, with 8 rows
  specstep serve engines/smol
  specstep serve small=engines/smol engines/qwen --port 9000 --max-queue 32
  {ENVIRONMENT}=secret1,secret2 specstep serve engines/smol --host 0.0.0.0

  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'

A page to chat with is at http://127.0.0.1:8000/, the list of all fields at /docs (docs/serving.md)."""


def add_options(parser: argparse.ArgumentParser) -> None:
    engines = f"{ENGINE}; or NAME=ENGINE, the name is the API's `model`"
    parser.add_argument("engines", metavar="ENGINE", nargs="+", help=engines)
    add_nodes_option(parser)
    add_device_option(parser)
    parser.add_argument(
        "--tool-format", metavar="FORM", help="how the models write calls of tools, as hermes, llama3, mistral or "
        "qwen3-coder (docs/serving.md has all; default: as each engine has it)"
    )  # fmt: skip
    _add_clients(parser.add_argument_group("who may call, and how much"))
    _add_prefixes(parser.add_argument_group("what is kept of calls, and their share of time"))
    _add_kv_events(parser.add_argument_group("for routers of several servers"))
    add_model_options(parser)


def _add_clients(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine alone)")
    add("--port", type=int, metavar="N", default=8000, help="port; 0 takes any that is free (default: 8000)")
    add(
        "--api-key",
        metavar="KEY",
        action="append",
        default=[],
        help=f"a key that opens the API; may be given again. Others see command lines: {ENVIRONMENT} holds keys, too, "
        "with commas between them",
    )
    add(
        "--max-connections", type=int, metavar="N", default=800, help="connections of all clients; those past them are "
        "refused (default: 800)"
    )  # fmt: skip
    add(
        "--max-queue", type=int, metavar="N", default=128, help="answers that may wait for a row of each model; a call "
        "past them gets status 429 (default: 128)"
    )  # fmt: skip
    add("--drain", type=int, metavar="S", default=30, help="seconds that answers have to end at shutdown (default: 30)")


def _add_prefixes(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--prefix-cache", type=int, metavar="MIB", default=256, help="memory of each model for keys and values of what "
        "was served: prompts that begin like it prefill the rest alone; 0 keeps nothing (default: 256)"
    )  # fmt: skip
    add(
        "--share-prefixes", action="store_true", help="share the prefix cache, and what n-grams learn, between API "
        "keys; with several keys and without this, nothing is learned"
    )  # fmt: skip
    add_learning_options(group)
    add("--log-prompts", action="store_true", help="write prompts to the log, which has none of them otherwise")
    add(
        "--prefill-per-step", type=int, metavar="N", default=64, help="most prompt tokens that are prefilled between "
        "two steps: the longest pause that a prompt makes in running streams (default: 64)"
    )  # fmt: skip
    add(
        "--stream-interval-ms", type=int, metavar="MS", default=40, help="least time from one chunk of a stream to the "
        "next: what comes between them goes out as one; 0 sends a chunk at each step (default: 40)"
    )  # fmt: skip


def _add_kv_events(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--kv-events", action="store_true", help="tell readers of /kv_events which blocks of tokens the prefix caches "
        "keep, so that a router sends a prompt to where its beginning is; they have all prompts' tokens"
    )  # fmt: skip
    add(
        "--kv-events-zmq", metavar="ENDPOINT", help="publish them over ZeroMQ, too, as vLLM does: tcp://*:5557 is "
        "bound, tcp://HOST:5557 connected to; for one engine"
    )  # fmt: skip
    add("--kv-events-topic", metavar="TOPIC", default="", help="of those messages, as kv@ADDRESS:PORT@MODEL for llm-d")


def run(options: argparse.Namespace) -> int:
    with needs_extra("serve", "serve"):
        from ..serving.loading import alive
        from ..serving.server import is_local, listen, serve
    from ..model_engines import engine_of
    from ..runtime.load import load

    asked = checked(options)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    how = load_options(options) | {"kv_events": asked.kv_events}
    with contextlib.ExitStack() as open_, listen(options.host, options.port) as bound:
        if not asked.api_keys and not is_local(options.host):
            say(OPEN.format(options.host), file=sys.stderr)
        with alive(bound, asked):
            with Progress() as progress:
                directories = {
                    name: engine_of(engine, progress, given_build(options), {"max_batch": ROWS}, options.device)
                    for name, engine in named(options.engines).items()
                }
            engines = {name: open_.enter_context(load(directory, **how)) for name, directory in directories.items()}
        if options.kv_events_zmq:
            from ..serving.kv_zmq import published

            logs = [engine.kv_events for engine in engines.values() if engine.kv_events is not None]
            open_.enter_context(published(logs[0], options.kv_events_zmq, options.kv_events_topic))
        fault = serve(engines, bound, asked, options.drain)
    if fault is None:
        return 0
    complain(fault)
    return EXIT_BROKEN


def checked(options: argparse.Namespace) -> "ServeOptions":
    """The server's options. Raises InputError for what goes wrong with any engine."""
    from ..serving.options import ServeOptions
    from ..serving.server import hosts_of

    keys = given_keys(options)
    asked = ServeOptions(
        api_keys=keys,
        max_queue=options.max_queue,
        log_prompts=options.log_prompts,
        share_prefixes=options.share_prefixes,
        kv_events=options.kv_events or bool(options.kv_events_zmq),
        stream_interval_ms=options.stream_interval_ms,
        hosts=hosts_of(options.host, bool(keys)),
        tool_format=options.tool_format,
        max_connections=options.max_connections,
    )
    for name in ("drain", "prefix_cache"):
        if getattr(options, name) < 0:
            raise InputError(
                f"{name.replace('_', '-')}: expected an integer of at least 0, got {getattr(options, name)}"
            )
    if options.learned and not asked.learning:
        raise InputError("learned: expected --share-prefixes beside it with several API keys, got none")
    if options.learned and len(options.engines) > 1:
        raise InputError(f"learned: expected one engine, which has the file, got {len(options.engines)}")
    if options.kv_events_zmq and len(options.engines) > 1:
        raise InputError(f"kv-events-zmq: expected one engine, of which subscribers read, got {len(options.engines)}")
    return asked


def load_options(options: argparse.Namespace) -> dict[str, Any]:
    """How engines are loaded."""
    return {
        "prefix_cache_bytes": options.prefix_cache * 2**20,
        "prefill_per_step": options.prefill_per_step,
        "nodes": given_nodes(options),
        "device": options.device,
        "progress": logging.getLogger(__name__).info,
        **given_learning(options),
    }


def given_keys(options: argparse.Namespace) -> tuple[str, ...]:
    """Those of the options and of the environment."""
    more = [key.strip() for key in os.environ.get(ENVIRONMENT, "").split(",")]
    return (*options.api_key, *(key for key in more if key))


def named(given: list[str]) -> dict[str, Path]:
    """Directories by the names of their models. Raises InputError for a name that is there twice."""
    found: dict[str, Path] = {}
    for each in given:
        name, equals, directory = each.partition("=")
        path = Path(directory if equals else each)
        name = name if equals else path.resolve().name
        if not name or name in found:
            raise InputError(f"engines: expected a name of its own for each, got {name!r} again; give NAME=DIR")
        found[name] = path
    return found
