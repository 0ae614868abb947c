"""`specstep profile`."""

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from ..errors import EngineError, InputError
from .files import write
from .terminal import say

if TYPE_CHECKING:
    from ..runtime.engine_file import EngineSpec

HELP = "show where the time of an engine's step goes: each stage, each op, and the bandwidth that it reaches"
EXAMPLES = """examples:
  specstep profile engines/smol
  specstep profile engines/smol --prompt-tokens 128,512,1536 --svg profile.svg
  specstep profile engines/batch --rows 4 --nodes 3 --json profile.json

Steps are timed in turn with reads of memory, so that GB/s and "one read" are those of this machine, now. Engines of
the backend inductor on a CPU have ops that can be timed."""
DEFAULT_TOKENS = 128


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("engine", metavar="DIR", help="engine directory")
    add("--prompt-tokens", metavar="N,...", help="tokens in each row's cache, one or several (default: 128)")
    add("--rows", type=int, metavar="N", default=1, help="rows in use (default: 1)")
    add("--nodes", type=int, metavar="N", help="drafted tokens that a step verifies (default: all)")
    add("--steps", type=int, metavar="N", default=40, help="steps to time, and as many to record (default: 40)")
    add("--json", metavar="FILE", help="write the figures as JSON")
    add("--svg", metavar="FILE", help="draw them")


def run(options: argparse.Namespace) -> int:
    from ..runtime.engine_file import read_manifest

    manifest = read_manifest(options.engine)
    lengths = _check(options, manifest.spec)
    from ..runtime.inductor.profile import profile  # imports torch
    from ..runtime.load import load
    from .profile_page import describe
    from .profile_svg import draw

    nodes = manifest.spec.nodes if options.nodes is None else options.nodes
    with load(options.engine, nodes="all") as engine:
        session: Any = engine.session
        profiles = [profile(session, length, options.rows, nodes, options.steps) for length in lengths]
    model, config = manifest.about["model"]["name"], manifest.spec.config
    title = f"{model}, {config['dtype']}, drafter {config['drafter']}, {nodes} drafted nodes"
    if config["drafter"] == "none":
        title = f"{model}, {config['dtype']}, no drafter"
    say(describe(title, profiles))
    if options.json:
        told = [dataclasses.asdict(profile) | {"stages": profile.stages()} for profile in profiles]
        write(options.json, json.dumps({"engine": title, "profiles": told}, indent=1) + "\n")
    if options.svg:
        write(options.svg, draw(title, profiles))
    return 0


def _check(options: argparse.Namespace, spec: "EngineSpec") -> list[int]:
    """The numbers of tokens to profile. Raises InputError and EngineError for what cannot be."""
    backend, device = spec.config.get("backend"), spec.device
    if (backend, device) != ("inductor", "cpu"):
        raise EngineError(
            f"profile: expected an engine of backend inductor on cpu, whose ops can be timed, got {backend} on "
            f"{device}; time whole steps with `specstep generate DIR --prompt TEXT --stats`"
        )
    if spec.ranks > 1:
        raise EngineError(f"profile: expected an engine of one rank, whose ops can be timed, got {spec.ranks} ranks")
    bounds = {"rows": (1, spec.max_batch), "nodes": (0, spec.nodes), "steps": (1, 100_000)}
    for name, (least, most) in bounds.items():
        number = getattr(options, name)
        if number is not None and not least <= number <= most:
            raise InputError(f"{name}: expected {least} to {most}, got {number}")
    most = spec.max_seq_len - 2  # the root, and a new token
    given = str(min(DEFAULT_TOKENS, most)) if options.prompt_tokens is None else options.prompt_tokens
    lengths = [int(word) if word.strip().isdecimal() else 0 for word in given.split(",")]
    if not all(1 <= length <= most for length in lengths):
        raise InputError(f"prompt-tokens: expected numbers from 1 to {most} (max_seq_len less 2), got {given}")
    return lengths
