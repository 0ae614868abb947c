"""What a drafter's tree is worth and what an engine's steps take, measured."""

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ...compile.assemble import assemble
from ...compile.config import EngineConfig
from ...compile.drafters.choose import scorers
from ...compile.jit import run_plain
from ...compile.settle_readings import settle_readings
from ...compile.source import Source
from ...errors import EngineError
from ...graphs.drafters.drafter import Scorer
from ...graphs.drafters.merged import Merged, parts
from ...graphs.step import SpeculativeStep
from ...progress import OnProgress
from ...runtime.acceptance import Acceptance
from ...runtime.engine import Engine
from ...runtime.inductor.profile import profile
from ...runtime.inductor.torch_session import TorchSession
from ...runtime.ladder.ladder import rungs_up_to
from ...runtime.ladder.measure_steps import measure
from ...runtime.session import Session
from .choose import DEPTH, TOP_K, Drafted, DrafterSetup, Steps, label, most_nodes

REPORT_EVERY = 5.0  # seconds
STEPS_S = 12.0  # that steps are timed for
DISTURBED = 0.1  # share of the processor that others may take while steps are timed
PROFILED = 12  # steps of each number of rows that are taken apart
MOST_DRAFT = 0.95  # share of a step that verifies nothing: what is left is the target's


def largest(drafter: str, deepest: int | None) -> DrafterSetup:
    """The tree of a drafter that is measured. deepest: how many levels it scores at most, None for any number."""
    depth = min(DEPTH, deepest or DEPTH)
    return DrafterSetup(drafter, most_nodes(depth, TOP_K), depth, TOP_K)


def try_drafter(
    source: Source,
    config: EngineConfig,
    drafter: str,
    prompts: Sequence[Any],
    max_new_tokens: int,
    progress: OnProgress,
) -> Drafted:
    """Answer the prompts with plain modules, which need no build, and see what is accepted of the largest tree. Raises
    BuildError and InputError."""
    name = label(drafter)
    progress(f"drafter {name}: putting it together")
    scorer, _ = scorers(source, dataclasses.replace(config, drafter=drafter))
    tree = largest(drafter, scorer.most_depth)
    settings = dataclasses.asdict(tree) | {"backend": "inductor", "max_batch": config.max_batch}
    graphs = assemble(source, dataclasses.replace(config, **settings), scorer)
    settle_readings(source, graphs, config.build_device, progress)
    step = graphs.step.module
    assert isinstance(step, SpeculativeStep)
    with run_plain(source, graphs) as engine, _timed(step.drafter) as drafts:
        chat = engine.has_chat_template
        requests = [
            engine.request(prompt, max_new_tokens, name=f"prompt {place}", chat=chat, learning=False)
            for place, prompt in enumerate(prompts)
        ]
        done, reported = 0, time.monotonic()
        for request, _ in engine.run(requests):
            done += request.finish_reason is not None
            if time.monotonic() - reported > REPORT_EVERY:
                reported = time.monotonic()
                progress(f"drafter {name}: {done} of {len(requests)} prompts answered")
    each = sorted((Acceptance.of([request]).tokens_per_step, place) for place, request in enumerate(requests))
    easy = [requests[place] for _, place in each[len(each) * 2 // 3 :]]
    length = sum(len(request.prompt) + len(request.tokens) / 2 for request in requests) / len(requests)
    drafted = Acceptance.of(requests)
    progress(f"drafter {name}: {drafted.tokens_per_step:.2f} tokens per step with {tree.nodes} nodes")
    levels = costly_levels(scorer, tree.depth)
    return Drafted(drafter, tree.depth, levels, drafted, Acceptance.of(easy), length, statistics.median(drafts))


@contextlib.contextmanager
def _timed(module: nn.Module) -> Iterator[list[float]]:
    """Within it the seconds that a module's calls take, one after the other, are gathered."""
    begun, seconds = list[float](), list[float]()
    before = module.register_forward_pre_hook(lambda *_: begun.append(time.perf_counter()))
    after = module.register_forward_hook(lambda *_: seconds.append(time.perf_counter() - begun[-1]))
    try:
        yield seconds
    finally:
        before.remove()
        after.remove()


def costly_levels(scorer: Scorer, depth: int) -> int:
    """Levels of a tree that a scorer scores at a cost: all; but of a mixture with n-grams those at which its neural
    scorers are asked, and one where a pass scores all."""
    neural = {part.neural for part in parts(scorer)}
    if scorer.neural and scorer.all_at_once:
        return 1
    return min(scorer.levels, depth) if isinstance(scorer, Merged) and len(neural) == 2 else depth


def time_steps(engine: Engine, length: float, progress: OnProgress) -> Steps:
    """Time the steps of an idle engine by rows and nodes, for rows of this length; what the drafter takes of them is
    left out where ops cannot be timed (`draft_shares`)."""
    session, spec = engine.session, engine.spec
    progress("timing steps by rows and nodes")
    begin = time.perf_counter(), time.process_time(), busy_seconds()
    times = measure(session, rungs_up_to(spec.nodes), STEPS_S)
    took, own, all_of_them = time.perf_counter() - begin[0], time.process_time() - begin[1], busy_seconds() - begin[2]
    others = (all_of_them - own) / (took * (os.cpu_count() or 1))
    if others > DISTURBED:
        progress(
            f"warning: other programs took {others:.0%} of the processor while steps were timed: long steps, those of "
            "many nodes, seem too slow; tune again when they are done"
        )
    seconds = {rows: times.seconds(rows, length) for rows in times.table}
    saved = {rows: max((of[rows] for of in times.saved.values()), default=0.0) for rows in seconds}
    return Steps(times.rungs, seconds, dict.fromkeys(seconds, 0.0), saved)


def busy_seconds() -> float:
    """Of all processors together since the machine was started, 0 where it does not say."""
    try:
        user, nice, system, _, _, irq, soft_irq = map(int, Path("/proc/stat").read_text().split(maxsplit=8)[1:8])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")


def with_drafts(steps: Steps, shares: Mapping[int, float]) -> Steps:
    """Steps of which, when they verify nothing, the drafter takes these shares."""
    draft = {rows: min(shares[rows], MOST_DRAFT) * times[0] for rows, times in steps.seconds.items()}
    return dataclasses.replace(steps, draft=draft)


def beside(steps: Steps, plain: Steps) -> Steps:
    """Steps of which the drafter takes what those of an engine without one do not."""
    draft = {rows: max(times[0] - plain.seconds[rows][0], 0.0) for rows, times in steps.seconds.items()}
    return dataclasses.replace(steps, draft=draft)


def draft_shares(
    session: Session, sizes: Sequence[int], length: float, progress: OnProgress
) -> dict[int, float] | None:
    """Rows -> the share of a step in which an idle session drafts, one that verifies nothing; None where ops cannot be
    timed."""
    if not isinstance(session, TorchSession) or session.spec.device != "cpu":
        return None
    shares = {}
    tokens = max(1, min(int(length), session.spec.max_seq_len - 2))
    for rows in sizes:
        progress(f"timing the drafter at {rows} row{'s' * (rows > 1)}")
        try:
            found = profile(session, tokens, rows, 0, PROFILED)
        except EngineError:
            return None
        shares[rows] = found.stages()["draft"] / found.recorded_s
    return shares
