"""`specstep bench-acceptance`."""

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError
from ..runtime.asked.sampling_params import SamplingParams
from .files import write
from .nodes_option import add_nodes_option, given_nodes
from .progress import Progress
from .prompts import LINES, Entry, make_requests, read_prompts
from .stats import course, verified
from .terminal import say

if TYPE_CHECKING:
    from ..runtime.acceptance import Acceptance
    from ..runtime.asked.request import Request
    from ..runtime.engine import Engine

HELP = "measure how many drafted tokens an engine's target accepts"
EXAMPLES = """examples:
  specstep bench-acceptance engines/smol --prompts questions.jsonl
  specstep bench-acceptance engines/smol --prompts questions.jsonl --max-new-tokens 200 --png acceptance.png
  specstep bench-acceptance engines/smol --prompts questions.jsonl --temperature 1 --seed 7
  specstep bench-acceptance engines/smol --prompts questions.jsonl --nodes auto   # and which sizes it chooses"""
REPORT_EVERY = 2.0  # seconds
WIDEST = 16  # columns of a line of shares


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("engine", metavar="ENGINE", help="engine directory")
    add("--prompts", metavar="FILE", required=True, help=LINES)
    add("--max-new-tokens", type=int, metavar="N", default=200, help="most new tokens per prompt (default: 200)")
    add("--temperature", type=float, metavar="T", default=0.0, help="0 is greedy (default: 0)")
    add("--seed", type=int, metavar="N", default=0, help="the i-th prompt is sampled with the seed N + i (default: 0)")
    add("--raw", action="store_true", help="give the prompts to the model as they are, not in its chat template")
    add("--learned", metavar="FILE", type=Path, help="start from what an engine learned; nothing is learned meanwhile")
    add_nodes_option(parser, default="all")
    add("--json", metavar="FILE", help="write the figures as JSON")
    add("--png", metavar="FILE", help="draw them (needs matplotlib, of the extra `plot`)")


def run(options: argparse.Namespace) -> int:
    if options.png:
        from .acceptance_plot import require_matplotlib

        require_matplotlib()
    sampling = SamplingParams(temperature=options.temperature, seed=options.seed)
    entries = [
        entry._replace(sampling={"temperature": sampling.temperature, "seed": options.seed + at})
        for at, entry in enumerate(read_prompts(options.prompts))
    ]
    from ..runtime.load import load

    engine = load(options.engine, nodes=given_nodes(options), learning=False, learned=options.learned)
    chat = not options.raw and engine.has_chat_template
    made = make_requests(engine, entries, options.max_new_tokens, chat=chat)
    requests = [(entry, request) for entry, choices in made for request in choices]
    if not requests:
        raise InputError(f"prompts: expected at least one that the engine can take, got none in {options.prompts}")
    run_all(engine, requests)
    members = {"all": [request for _, request in requests]}
    for category in sorted({entry.category for entry, _ in requests} - {""}):
        members[category] = [request for entry, request in requests if entry.category == category]
    _tell(options, engine, members)
    return 2 if len(requests) < len(entries) else 0


def _tell(options: argparse.Namespace, engine: "Engine", members: "dict[str, list[Request]]") -> None:
    """Print, write and draw what finished requests say; members: "all", and those of each category."""
    from ..runtime.acceptance import Acceptance

    groups = {name: Acceptance.of(some) for name, some in members.items()}
    courses = {name: course(some) for name, some in members.items()}
    say(table(groups))
    if options.nodes == "auto":
        say("\n" + verified(members["all"]))
    config = {name: engine.spec.config[name] for name in ("drafter", "nodes", "depth", "top_k", "dtype")}
    if options.json:
        figures = {name: group.to_dict() | {"nodes_course": courses[name]} for name, group in groups.items()}
        asked = {"temperature": options.temperature, "seed": options.seed}
        whole = {"engine": Path(options.engine).name} | asked | config | {"groups": figures}
        write(options.json, json.dumps(whole, indent=1) + "\n")
    if options.png:
        from .acceptance_plot import draw

        drafter = f"drafter {config['drafter']}, {config['nodes']} nodes"
        how = f"temperature {options.temperature}" if options.temperature else "greedy"
        draw(options.png, groups, f"{Path(options.engine).name}: {drafter}, {how}", courses)


def run_all(engine: "Engine", requests: list[tuple[Entry, "Request"]]) -> None:
    """Run requests to their end, with a line now and then about how far it is."""
    done, tokens, steps, reported = 0, 0, 0, time.monotonic()
    with Progress() as progress:
        for request, _ in engine.run([request for _, request in requests]):
            if request.finish_reason:
                done, tokens, steps = done + 1, tokens + len(request.tokens), steps + request.steps
            if time.monotonic() - reported > REPORT_EVERY:
                reported = time.monotonic()
                progress(f"{done} of {len(requests)} prompts, {tokens / max(steps, 1):.2f} tokens per step")


def table(groups: dict[str, "Acceptance"]) -> str:
    """The figures for a terminal."""
    lines = [f"{'':<16}{'prompts':>8}{'tokens':>8}{'steps':>8}  tokens per step"]
    for name, group in groups.items():
        lines.append(f"{name:<16}{group.requests:>8}{group.tokens:>8}{group.steps:>8}{group.tokens_per_step:>17.2f}")
    whole = groups["all"]
    if not whole.by_depth():
        return "\n".join([*lines, "", "no drafted token was accepted"])
    lines += ["", "steps that accept ..."]
    lines += _shares("  a path of depth", whole.by_depth())
    lines += _shares("  node of the tree", whole.by_node())
    lines += ["accepted tokens that were ..."]
    lines += _shares("  choice", whole.by_rank())
    return "\n".join(lines)


def _shares(name: str, shares: list[float]) -> list[str]:
    """Places and their shares, in as many pairs of lines as it takes."""
    lines = []
    for first in range(0, len(shares), WIDEST):
        part = shares[first : first + WIDEST]
        lines.append(f"{name:<20}" + "".join(f"{first + place:>6}" for place in range(1, len(part) + 1)))
        lines.append(f"{'':<20}" + "".join(f"{share:>6.1%}" for share in part))
    return lines
