"""Compare engines' steps with torch's, on recorded steps of a real generation, through polygraphy."""

import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata
from polygraphy.comparator import Comparator
from polygraphy.logger import G_LOGGER

from ..errors import BuildError, InputError
from ..progress import OnProgress, silent
from ..report import Report
from ..runtime.buffers import Tensors
from ..runtime.engine import Engine
from ..runtime.engine_file import NEXT, SIZES, EngineSpec, TensorSpec, read_manifest
from ..runtime.load import load
from ..runtime.session import Session
from .config import EngineConfig
from .differences import Worst, within, worst_output
from .jit import eager

PROMPT = "List three facts about light, then list them again."
TOLERANCE = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 0.2}  # of a vector's norm: a wrong one is off by about 1
OF_BACKEND = (
    "backend",
    "device",
    "compute_capability",
    "plugins",
    "weights",
)  # options that a step in torch does not have
SWAPPED = ("tree_tokens", "tree_parents", "learned")  # last parts of names of what rounding swaps
NOT_OF_STEP = (*OF_BACKEND, "prefill_chunk")  # options that leave a step as it is


class Comparison(NamedTuple):
    """Whether all runners agree, on how many steps, and for each pair the worst output."""

    agree: bool
    steps: int
    worst: list[Worst]


class SessionRunner(BaseRunner):
    """A session's step as a polygraphy runner. Its inputs are what `Session.read` gives, the nodes to verify, and the
    positions to catch up."""

    def __init__(self, name: str, session: Session, outputs: Collection[str]):
        """outputs: `next.X` for input X as it is after the step, and the report."""
        super().__init__(name=name)
        self.session, self.outputs = session, outputs

    def get_input_metadata_impl(self) -> TensorMetadata:
        metadata = TensorMetadata()
        for name, array in step_inputs(self.session, 1, self.session.spec.slot_step).items():
            metadata.add(name, array.dtype, [None] * array.ndim)
        return metadata

    def infer_impl(self, feed_dict: Tensors) -> Tensors:
        caches, rows = self.session.spec.caches, len(feed_dict["lengths"])
        slots = feed_dict[caches[0].name].shape[2] if caches else self.session.spec.slot_step
        self.session.write({name: array for name, array in feed_dict.items() if name not in SIZES})
        started = time.perf_counter()
        nodes, *sizes = (len(feed_dict[name]) for name in SIZES)
        report = self.session.replay(rows, slots, nodes - 1, *sizes)
        self.inference_time = time.perf_counter() - started
        report = np.array(report)
        if self.session.spec.config["dtype"] != "float32":  # scores are of the next tree, which `compared` leaves out
            for row in report:
                Report.split(row).scores[:] = 0
        after: Tensors = self.session.read(rows, slots) | {"report": report}
        return {name: after[name.removeprefix(NEXT)] for name in self.outputs}


def step_inputs(session: Session, rows: int, slots: int) -> Tensors:
    """What a step of this size reads, all nodes of its trees."""
    sizes = (1 + session.spec.nodes, 1 + session.spec.depth)
    return dict(zip(SIZES, map(np.arange, sizes), strict=True)) | session.read(rows, slots)


def compare(
    directories: Sequence[str | Path],
    model: str | None = None,
    drafter: str | None = None,
    steps: int = 8,
    save: str | Path | None = None,
    progress: OnProgress = silent,
) -> Comparison:
    """Replay recorded steps of a real generation in torch and in engines of the same configuration, of any backend.

    model, drafter: what the engines were built from, by default what the first one's manifest says. save: folder for
    the inputs and outputs as polygraphy JSON. Raises InputError for engines or a model that do not fit together.
    """
    paths = _saved(save)
    check_same_step({Path(directory): read_manifest(directory).spec for directory in directories})
    progress(f"loading {', '.join(map(str, directories))}")
    sessions = {Path(directory): load(directory, nodes="all").session for directory in directories}
    reference = _torch_engine(next(iter(sessions)), model, drafter, progress)
    progress(f"recording {steps} steps")
    feeds = record(reference, steps)
    outputs = compared(reference.spec)
    runners = [SessionRunner("torch", reference.session, outputs)]
    for directory, session in sessions.items():
        backend = session.spec.config["backend"]
        name = f"{backend} {directory}" if len(sessions) > 1 else backend
        runners.append(SessionRunner(name, session, outputs))
    progress(f"comparing {' and '.join(runner.name for runner in runners)}")
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        results = Comparator.run(runners, data_loader=feeds, **paths)
        tolerance = TOLERANCE[reference.spec.config["dtype"]]
        agree = bool(Comparator.compare_accuracy(results, compare_func=lambda *pair: within(tolerance, *pair)))
    named = {name: list(iterations) for name, iterations in results}
    first, *others = named
    return Comparison(agree, len(feeds), [worst_output((first, other), named[first], named[other]) for other in others])


def _saved(folder: str | Path | None) -> dict[str, str]:
    """Where inputs and outputs go, as polygraphy names it. Raises InputError."""
    if folder is None:
        return {}
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"save: expected a folder that can be written, got {folder}: {error.strerror}") from None
    return {f"save_{kind}_path": str(Path(folder) / f"{kind}.json") for kind in ("inputs", "outputs")}


def record(engine: Engine, steps: int) -> list[Tensors]:
    """Generate, past any stop token -> what each step reads: half of the steps with every row, half with the first
    alone."""
    session, feeds = engine.session, list[Tensors]()
    length = session.spec.max_seq_len
    tokens = engine.text.encode(PROMPT) if engine.text else [2, 3, 4, 5] * 6
    batch = session.spec.max_batch
    for rows, count in ((batch, steps - steps // 2), (1, steps // 2)):
        if not count:
            continue
        for row in range(rows):  # of different lengths
            session.admit((tokens[: max(1, len(tokens) - row)])[: length - 2], length, [])
        for _ in range(count):
            feeds.append(step_inputs(session, *session.next_size()))
            session.step()
        for row in range(rows):
            session.release(row)
    return feeds


def _torch_engine(directory: Path, model: str | None, drafter: str | None, progress: OnProgress) -> Engine:
    """The model itself, as an engine was configured. Raises InputError for another model."""
    manifest = read_manifest(directory)
    name = model or manifest.about["model"]["name"]
    progress(f"loading {name}")
    fields = {field.name for field in dataclasses.fields(EngineConfig)} - set(OF_BACKEND)
    options: Any = {name: value for name, value in manifest.spec.config.items() if name in fields}
    try:
        engine = eager(name, **options | ({"drafter": drafter} if drafter else {}))
    except BuildError as error:
        raise InputError(
            f"{error} ({directory} was built from it; name a model or drafter that is elsewhere now with --model, "
            "--drafter)"
        ) from None
    if _layout(engine.spec) != _layout(manifest.spec):
        raise InputError(f"model: expected the one that {directory} was built from, got another; name it with --model")
    return engine


def check_same_step(specs: Mapping[Path, EngineSpec]) -> None:
    """All have the step and the state of the first. Raises InputError."""
    (first, expected), *others = specs.items()
    for directory, spec in others:
        ours, theirs = _step_options(expected), _step_options(spec)
        odd = [name for name in ours if theirs[name] != ours[name]]
        if odd or _layout(spec) != _layout(expected):
            raise InputError(
                f"engine: expected the model and the step of {first}, got others in {directory}: "
                f"{', '.join(odd) or 'the model'} differs"
            )


def _layout(spec: EngineSpec) -> tuple[TensorSpec, ...]:
    return (*spec.state, *spec.shared, *spec.caches)


def _step_options(spec: EngineSpec) -> dict[str, Any]:
    """What a step was built with; files by their names, wherever they were."""
    fields: dict[str, Any] = dataclasses.asdict(EngineConfig())  # of older engines, too
    options = {name: value for name, value in (fields | spec.config).items() if name not in NOT_OF_STEP}
    drafters = [Path(name).name for name in options["drafter"].split(",")]
    choices = options["tree_choices"]
    return options | {"drafter": drafters, "tree_choices": choices and Path(choices).name}


def compared(spec: EngineSpec) -> list[str]:
    """What a step changes, as ONNX files name it. In half precision less the next draft tree, whose nodes follow close
    scores, and what was counted of rejected drafts: rounding swaps them, and no token depends on it."""
    changing = {*spec.step.outputs, "history"} | {tensor.name for tensor in (*spec.shared, *spec.caches)}
    if spec.config["dtype"] != "float32":
        changing = {name for name in changing if name.rpartition(".")[2] not in SWAPPED}
    return ["report", *(NEXT + tensor.name for tensor in _layout(spec) if tensor.name in changing)]
