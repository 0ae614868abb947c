"""`specstep tune`: which drafter and which tree are fastest for a model on this machine, by measurement.

What the target accepts of each drafter is seen with plain modules, which need no build. Then one engine is built for
the drafter of which most is accepted: it verifies any number of nodes, so it says what steps take by rows and nodes,
and with what its drafter takes left out, what plain decoding takes. Another drafter gets an engine only if it could be
faster, were its drafts a little faster than the plain modules lead to expect.
"""

import dataclasses
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...compile.build import build, make_config
from ...compile.config import EngineConfig
from ...compile.drafters.choose import default_drafters, fitting_drafters
from ...compile.source import Source, load_source
from ...compile.tuned import save_tuned
from ...errors import BuildError, InputError
from ...progress import OnProgress, silent
from ...runtime.engine import Engine
from ...runtime.load import load
from .choose import CLOSE, DEPTH, PLAIN, TOP_K, Drafted, DrafterSetup, Expected, Steps, best_tree, choose, label
from .measure import beside, draft_shares, largest, time_steps, try_drafter, with_drafts

ROWS = 8  # most rows that are measured, where the user does not say
ENGINES = 2  # most drafters that an engine is built for
OPTIMISM = 0.8  # share of the time that a drafter is expected to take in what it could bring
LADDERS = ("inductor", "onnx")  # backends whose engines verify any number of nodes
QUESTIONS = (
    "Why is the sky blue?",
    "Write a short email to a colleague to ask for last month's sales figures.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "A shop sells pens at 3 dollars and books at 12. I buy 4 pens and 2 books. What do I pay?",
    "List five tips for learning a new language.",
    "Translate into German: The weather is nice today, and we want to go to the lake.",
    "Tell me a story about a lighthouse keeper who finds a letter.",
    "Summarize: The committee met on Monday. The committee agreed to repair the bridge before winter. The repair of "
    "the bridge will cost two million, and the committee will meet again when the repair of the bridge is done.",
    "What are the pros and cons of working from home?",
    "Explain to a child how a bicycle stays upright.",
)


def tune(
    model: str,
    prompts: Sequence[Any] = QUESTIONS,
    *,
    drafters: Sequence[str] = (),
    max_new_tokens: int = 128,
    progress: OnProgress = silent,
    **options: Any,
) -> dict[str, Any]:
    """Measure, choose, and keep the choices for `build` -> "choices" (options of `build`, and why, for engines of 1, 2,
    4, ... rows), "plain" (tokens/s without drafts by rows) and "drafters" (what was measured of each).

    prompts: text or token ids. drafters: what to try beside those that fit the model, as in `build`. options: dtype,
    device, backend, max_batch (8 unless given) and max_seq_len of the engines. Raises BuildError and InputError.
    """
    options = {"max_batch": ROWS} | options
    config = make_config(options)
    _check(config, prompts)
    progress(f"loading {model}")
    source = load_source(model, config.dtype, config.device, config.adapter)
    names = list(dict.fromkeys([*candidates(source), *map(absolute, drafters)]))
    drafted = [try_drafter(source, config, name, prompts, max_new_tokens, progress) for name in names]
    with tempfile.TemporaryDirectory(prefix="specstep-tune-") as folder:
        steps = Bench(model, options, Path(folder), progress).measure(drafted)
    result = summary(drafted, steps)
    try:
        progress(f"kept in {save_tuned(source, config, result['choices'], result['drafters'])}")
    except OSError as error:
        raise BuildError(f"tune: the choice ({result['choices'][0]['because']}) could not be kept: {error}") from None
    return result


def _check(config: EngineConfig, prompts: Sequence[Any]) -> None:
    """Raises BuildError and InputError."""
    if config.backend not in LADDERS:
        raise BuildError(
            f"backend: expected {' or '.join(LADDERS)}, whose engines verify any number of nodes, got "
            f"{config.backend}; build it with a few values of --nodes and compare `specstep generate --stats`"
        )
    if not prompts:
        raise InputError("prompts: expected at least one to try drafters on, got none")


def candidates(source: Source) -> list[str]:
    """The drafters that fit a model, the mixture of what the package has first, and the parts of mixtures alone: each
    may be faster."""
    shipped, fitting = default_drafters(source), fitting_drafters(source)
    mixed = ["default"] if shipped == fitting else [",".join(fitting)]
    return [*(mixed if len(fitting) > 1 else []), *fitting, *([] if "ngram" in fitting else ["ngram"])]


def absolute(drafter: str) -> str:
    """A drafter's name that means the same from every directory."""
    parts = (Path(part).expanduser() for part in drafter.split(","))
    return ",".join(str(part.absolute()) if part.exists() else str(part) for part in parts)


class Bench:
    """Builds engines of a model and times their steps."""

    def __init__(self, model: str, options: dict[str, Any], folder: Path, progress: OnProgress):
        self.model, self.options, self.folder, self.progress = model, options, folder, progress
        self._plain: Steps | None = None

    def measure(self, drafted: Sequence[Drafted]) -> dict[str, Steps]:
        """Name -> an engine's steps, of the drafter of which most is accepted, and of another that could be faster."""
        left, found = {each.drafter: each for each in drafted}, dict[str, Steps]()
        candidate = max(drafted, key=lambda each: each.acceptance.tokens_per_step)
        expected = dict[str, float]()
        while True:
            name = candidate.drafter
            found[name] = self._steps(left.pop(name))
            expected[name] = best_tree(candidate, found[name]).mean
            if not left or len(found) == ENGINES:
                return found
            known = [(each, found[each.drafter]) for each in drafted if each.drafter in found]
            limits = {name: limit(each, known).mean for name, each in left.items()}
            most = max(limits, key=lambda name: limits[name])
            if limits[most] * CLOSE < max(expected.values()):
                self.progress(f"no engine for {', '.join(map(label, left))}: none could be faster")
                return found
            candidate = left[most]

    def _steps(self, drafted: Drafted) -> Steps:
        with self._build(largest(drafted.drafter, drafted.depth)) as engine:
            steps = time_steps(engine, drafted.length, self.progress)
            shares = draft_shares(engine.session, list(steps.seconds), drafted.length, self.progress)
        if shares is not None:
            return with_drafts(steps, shares)
        if self._plain is None:
            with self._build(PLAIN) as engine:
                self._plain = time_steps(engine, drafted.length, self.progress)
        return beside(steps, self._plain)

    def _build(self, choice: DrafterSetup) -> Engine:
        self.progress(f"building an engine with drafter {label(choice.drafter)}")
        folder = self.folder / "engine"
        build(self.model, folder, progress=self.progress, **(self.options | dataclasses.asdict(choice)))
        engine = load(folder, nodes="all", learning=False)  # what it maps stays when the directory goes
        shutil.rmtree(folder)
        return engine


def limit(drafted: Drafted, measured: Sequence[tuple[Drafted, Steps]]) -> Expected:
    """The most that a drafter could bring: on the fastest of the steps that were measured, with drafts that take a
    little less than the plain modules' times lead to expect."""
    shares = [OPTIMISM * drafted.draft_s / max(each.draft_s, 1e-9) for each, _ in measured]
    best = [best_tree(drafted, steps.with_drafts_of(s)) for s, (_, steps) in zip(shares, measured, strict=True)]
    return max(best, key=lambda expected: expected.mean)


def summary(drafted: Sequence[Drafted], measured: Mapping[str, Steps]) -> dict[str, Any]:
    """What `tune` returns."""
    both = [(each, measured[each.drafter]) for each in drafted if each.drafter in measured]
    sizes = list(both[0][1].seconds)
    plain = {rows: min(steps.plain(rows) for _, steps in both) for rows in sizes}
    return {
        "choices": [_choice(both, rows, plain) for rows in sizes],
        "plain": [{"rows": rows, "step_s": plain[rows], "tokens_per_s": rows / plain[rows]} for rows in sizes],
        "drafters": [_figures(each, both, plain) for each in drafted],
    }


def _choice(both: Sequence[tuple[Drafted, Steps]], rows: int, plain: Mapping[int, float]) -> dict[str, Any]:
    """The choice for engines of so many rows, with a line that says why."""
    choice, best = choose(both, rows)
    where = "1 row" if rows == 1 else f"1 to {rows} rows"
    said = f"expected {best.mean:.2f} times the speed of plain decoding at {where}"
    if choice == PLAIN:
        name = label(best.choice.drafter)
        because = f"no drafts: this model does not gain from them on this machine; the best, drafter {name}: {said}"
    else:
        speeds = f"{rows * best.speed[rows] / plain[rows]:.0f} against {rows / plain[rows]:.0f} tokens/s"
        because = f"{choice}: {said}; {speeds} at {rows} row{'s' * (rows > 1)}"
    return {"max_batch": rows, "because": because} | dataclasses.asdict(choice)


def _figures(drafted: Drafted, both: Sequence[tuple[Drafted, Steps]], plain: Mapping[int, float]) -> dict[str, Any]:
    """What was measured of a drafter and what it is expected to bring, by rows; estimated where no engine was built."""
    steps = next((steps for each, steps in both if each is drafted), None)
    rungs = (steps or both[0][1]).rungs
    accepted = [drafted.acceptance.with_tree(nodes, DEPTH, TOP_K) for nodes in rungs]
    best = best_tree(drafted, steps) if steps else limit(drafted, both)
    by_rows = [
        {"rows": rows, "speed": best.speed[rows], "tokens_per_s": rows * best.speed[rows] / plain[rows]}
        | {"nodes": best.nodes[rows]}
        | ({"step_s": list(steps.seconds[rows]), "draft_s": steps.draft[rows]} if steps else {})
        for rows in plain
    ]
    about = {
        "drafter": drafted.drafter,
        "name": label(drafted.drafter),
        "built": steps is not None,
        "rungs": list(rungs),
        "tokens_per_step": accepted,
    }
    return about | {"easy_tokens_per_step": drafted.easy.tokens_per_step, "by_rows": by_rows}
