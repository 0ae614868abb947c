"""`specstep tune`: which drafter and which tree are fastest for a model on this machine, by measurement.

A step's time is measured for a few sizes of tree, what a drafter has accepted for one large tree. Because the nodes of
a dynamic tree are in order of score, that says what its smaller trees would accept, so all of them are judged by a few
engines; the one that should be fastest is then built and run too.

Every engine is run beside one that does not draft, prompt by prompt: a busy machine slows both.
"""

import dataclasses
import itertools
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..compile.build import build, make_config
from ..compile.drafters.choose import default_drafters
from ..compile.source import load_source
from ..compile.tuned import save_tuned
from ..errors import BuildError
from ..graphs.tree import DynamicTree
from ..runtime.acceptance import Acceptance
from ..runtime.engine import Engine, load

Report = Callable[[str], None]

SIZES, DEPTH, TOP_K = (7, 15, 31), 7, 4  # of the trees that are measured
CLOSE = 0.99  # of two trees with nearly the same prediction the smaller one is taken
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


@dataclass(frozen=True)
class Choice:
    """A drafter and its tree, as options of `build`."""

    drafter: str
    nodes: int
    depth: int
    top_k: int
    tree: str | None = "dynamic"

    def __str__(self) -> str:
        shape = f", {self.nodes} nodes, depth {self.depth}, top-k {self.top_k}" if self.nodes else ""
        return f"drafter {self.drafter}{shape}"

    @property
    def expanded(self) -> int:
        """Nodes that the drafter scores the children of."""
        return 1 + (self.depth - 1) * self.top_k if self.depth else 0


PLAIN = Choice("none", 0, 0, 1, None)


@dataclass(frozen=True)
class Measured:
    """Of an engine: what it accepted, and how long its step took, one without drafts being 1."""

    acceptance: Acceptance
    step: float

    @property
    def speed(self) -> float:
        """Tokens in the time in which an engine without drafts makes one."""
        return self.acceptance.tokens_per_step / self.step


def tune(
    model: str,
    prompts: Sequence[Any] = QUESTIONS,
    *,
    drafters: Sequence[str] = (),
    max_new_tokens: int = 128,
    report: Report = lambda message: None,
    **options: Any,
) -> dict[str, Any]:
    """Measure, choose, and keep the choice for `build` -> "choice" (options of `build`), "because" (a line) and
    "measured" (a row for each engine).

    prompts: text or token ids. drafters: what to try beside the drafters that every model has, as in `build`. options:
    dtype, device, backend and max_seq_len of the engines. Raises BuildError and InputError.
    """
    config = make_config(options)
    source = load_source(model, config.dtype, config.device)
    shipped = default_drafters(source)
    parts = shipped if len(shipped) > 1 else []  # the default mixes them; each may be faster alone
    default = [] if shipped == ["ngram"] else ["default", *parts]
    names = list(dict.fromkeys([*default, "ngram", *map(absolute, drafters)]))
    with tempfile.TemporaryDirectory(prefix="specstep-tune-") as folder:
        bench = Bench(model, options, Path(folder), prompts, max_new_tokens, report)
        first = [Choice(names[0], nodes, DEPTH, TOP_K) for nodes in SIZES]
        for choice in [*first, *(Choice(name, SIZES[-1], DEPTH, TOP_K) for name in names[1:])]:
            bench.measure(choice)
        bench.measure(predict(bench.measured, names))
    best = max(bench.measured, key=lambda choice: bench.measured[choice].speed)
    because = f"{best}: {bench.describe(best)}"
    if best != first[0]:
        because += f"; {first[0]}: {bench.describe(first[0])}"
    if best != PLAIN:
        because += f"; without drafts {bench.plain_rate:.0f} tokens/s"
    try:
        kept = dataclasses.replace(config, **dataclasses.asdict(best))
        report(f"kept in {save_tuned(source, kept, because, bench.rows())}")
    except OSError as error:
        raise BuildError(f"tune: the choice ({because}) could not be kept: {error}") from None
    return {"choice": dataclasses.asdict(best), "because": because, "measured": bench.rows()}


def absolute(drafter: str) -> str:
    """A drafter's name that means the same from every directory."""
    parts = (Path(part).expanduser() for part in drafter.split(","))
    return ",".join(str(part.absolute()) if part.exists() else str(part) for part in parts)


class Bench:
    """Builds engines of a model and runs each beside the one that does not draft. `measured` holds what came of it."""

    def __init__(
        self,
        model: str,
        options: dict[str, Any],
        folder: Path,
        prompts: Sequence[Any],
        max_new_tokens: int,
        report: Report,
    ):
        self.model, self.options, self.folder = model, options, folder
        self.prompts, self.max_new_tokens, self.report = prompts, max_new_tokens, report
        self._plain_tokens, self._plain_seconds = 0, 0.0
        self._plain = self._build(PLAIN)
        self.measured = {PLAIN: self._run(self._plain)}

    @property
    def plain_rate(self) -> float:
        """Tokens per second without drafts, over all runs."""
        return self._plain_tokens / self._plain_seconds

    def measure(self, choice: Choice) -> None:
        """Build and run an engine, unless that was done."""
        if choice not in self.measured:
            self.measured[choice] = self._run(self._build(choice))
            self.report(f"{choice}: {self.describe(choice)}")

    def describe(self, choice: Choice) -> str:
        """Its speed in words."""
        result = self.measured[choice]
        accepted = result.acceptance.tokens_per_step
        return (
            f"{self.plain_rate * result.speed:.0f} tokens/s here ({accepted:.2f} tokens per step of {result.step:.2f} "
            "plain ones)"
        )

    def rows(self) -> list[dict[str, Any]]:
        """For JSON."""
        return [
            dataclasses.asdict(choice)
            | {"tokens_per_step": result.acceptance.tokens_per_step, "step_of_plain": result.step}
            | {"tokens_per_s": self.plain_rate * result.speed}
            for choice, result in self.measured.items()
        ]

    def _build(self, choice: Choice) -> Engine:
        self.report(f"building {choice}")
        folder = self.folder / "engine"
        build(self.model, folder, report=self.report, **(self.options | dataclasses.asdict(choice)))
        engine = load(folder, nodes="all", learning=False)  # what it maps stays when the directory goes
        shutil.rmtree(folder)
        return engine

    def _run(self, engine: Engine) -> Measured:
        """Each prompt on the engine, then on the plain one: a step's time is the median of the prompts' ratios."""
        requests, ratios = [], []
        self.report(f"running it on {len(self.prompts)} prompts")
        for prompt in self.prompts:
            chat = engine.has_chat_template
            pair = [one.request(prompt, self.max_new_tokens, chat=chat) for one in (engine, self._plain)]
            for one, request in zip((engine, self._plain), pair, strict=True):
                one.submit(request).result()
            mine, plain = (request.decode_s / request.steps for request in pair)
            ratios.append(mine / plain)
            requests.append(pair[0])
            self._plain_tokens += len(pair[1].tokens)
            self._plain_seconds += pair[1].decode_s
        return Measured(Acceptance.of(requests), statistics.median(ratios))


def predict(measured: Mapping[Choice, Measured], names: Sequence[str]) -> Choice:
    """The drafter and the tree that should be fastest.

    The time of a step grows with the nodes as it does for the first drafter, whose trees were measured at all SIZES;
    what another takes more at the largest size is shared out to the nodes that it expands.
    """
    sizes = {choice.nodes: result.step for choice, result in measured.items() if choice.drafter in ("none", names[0])}
    rates = {}
    for name in names:
        largest = Choice(name, SIZES[-1], DEPTH, TOP_K)
        result = measured[largest]
        more = max(0.0, result.step - sizes[largest.nodes]) / largest.expanded
        for choice in trees(name):
            step = interpolate(sizes, choice.nodes) + more * choice.expanded
            rates[choice] = result.acceptance.with_tree(choice.nodes, choice.depth, choice.top_k) / step
    enough = CLOSE * max(rates.values())
    return min((c for c in rates if rates[c] >= enough), key=lambda choice: (choice.expanded, choice.nodes))


def trees(drafter: str) -> Iterator[Choice]:
    """All dynamic trees up to the largest that is measured."""
    for depth, top_k in itertools.product(range(1, DEPTH + 1), range(1, TOP_K + 1)):
        most = min(SIZES[-1], sum(DynamicTree.level_sizes(depth, top_k)))
        yield from (Choice(drafter, nodes, depth, top_k) for nodes in range(depth, most + 1))


def interpolate(known: Mapping[int, float], place: int) -> float:
    """The value at a place between known ones, on the straight line between its neighbours."""
    below, above = max(p for p in known if p <= place), min(p for p in known if p >= place)
    share = (place - below) / max(above - below, 1)
    return known[below] + share * (known[above] - known[below])
