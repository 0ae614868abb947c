"""`specstep export-triton`."""

import argparse
from pathlib import Path

from ..errors import InputError
from .terminal import say

HELP = "write a model repository for Triton Inference Server"
EXAMPLES = """examples:
  specstep export-triton engines/smol -o models
  specstep export-triton engines/smol -o models --name chat --instances 2 --link
  tritonserver --model-repository=models

  curl http://127.0.0.1:8000/v2/models/chat/generate_stream \\
    -d '{"prompt": "Why is the sky blue?", "chat": true, "max_new_tokens": 64}'

The tensors are described in models/NAME/config.pbtxt, the server in docs/scale.md."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("engine", metavar="DIR", help="engine directory")
    add("-o", "--output", metavar="REPO", required=True, help="the repository; its other models stay as they are")
    add("--name", metavar="NAME", help="the model's name (default: that of DIR)")
    add("--instances", type=int, metavar="N", default=1, help="engines that share the requests (default: 1)")
    add(
        "--max-queue", type=int, metavar="N", default=128, help="answers that may wait for a row of an instance; past "
        "them requests end with UNAVAILABLE (default: 128)"
    )  # fmt: skip
    add("--tool-format", metavar="NAME", help="how the model writes calls of tools, as hermes or llama3 "
        "(docs/serving.md has all; default: as the engine's manifest has it)")  # fmt: skip
    add("--link", action="store_true", help="link to DIR in place of a copy")


def run(options: argparse.Namespace) -> int:
    from ..compile.swap import replace, work_folder
    from ..runtime.calls.formats import form_named
    from ..serving.triton.repository import CONFIG, MARK, write_model

    if options.tool_format is not None:
        form_named(options.tool_format)
    engine = Path(options.engine)
    name = engine.resolve().name if options.name is None else options.name
    if not name or name in (".", "..") or "/" in name:
        raise InputError(f"name: expected the name of a folder, got {name!r}")
    for field, least in (("instances", 1), ("max_queue", 0)):
        if getattr(options, field) < least:
            raise InputError(
                f"{field.replace('_', '-')}: expected an integer of at least {least}, got {getattr(options, field)}"
            )
    place = Path(options.output) / name
    config = place / CONFIG
    if place.exists() and not (
        config.is_file() and config.read_text(encoding="utf-8", errors="replace").startswith(MARK)
    ):
        raise InputError(f"output: expected a new model, or one that this command wrote, got {place}")
    try:
        with work_folder(place) as work:
            write_model(work, engine, options.instances, options.max_queue, options.tool_format, options.link)
            replace(work, place)
    except OSError as error:
        raise InputError(f"output: {place}: could not be written: {error.strerror or error}") from None
    say(f"{place}: a model of {options.instances} instance{'s' if options.instances > 1 else ''}")
    return 0
