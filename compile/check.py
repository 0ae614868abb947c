"""Compare engines' steps with torch's, on recorded steps of a real generation, through polygraphy."""

import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata
from polygraphy.comparator import Comparator
from polygraphy.logger import G_LOGGER

from ..controls import TOP_LOGPROBS
from ..errors import BuildError, InputError
from ..progress import OnProgress, silent
from ..report import LEAST_LOGPROB, LOGPROB_STEPS, SCORE_STEPS, Report
from ..runtime.buffers import Tensors
from ..runtime.engine import Engine
from ..runtime.engine_file import NEXT, SIZES, EngineSpec, TensorSpec, read_manifest
from ..runtime.load import load
from ..runtime.session import Session
from .config import EngineConfig
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
SCORES = "scores"  # what those of a report are called beside its integers
NOT_OF_STEP = (*OF_BACKEND, "prefill_chunk")  # options that leave a step as it is


class Worst(NamedTuple):
    """Where two runners differ most."""

    runners: tuple[str, str]  # the reference, and the one compared with it
    name: str  # of the output; "": none to compare
    step: int  # number of the recorded step, from 0
    place: tuple[int, ...]  # index of the element
    error: float  # `distance` at it
    expected: float  # the reference's value
    got: float  # the other's


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
        after: Tensors = self.session.read(rows, slots) | {"report": np.array(report)}
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


def worst_output(runners: tuple[str, str], one: Sequence[Any], other: Sequence[Any]) -> Worst:
    """The element where two runners' iterations differ most."""
    worst = Worst(runners, "", 0, (), -1.0, 0.0, 0.0)
    for step, (expected, got) in enumerate(zip(map(settled, one), map(settled, other), strict=True)):
        for name, a in expected.items():
            b, errors = got[name], distance(a, got[name])
            if errors.size and errors.max() > worst.error:
                place = tuple(int(index) for index in np.unravel_index(int(np.argmax(errors)), errors.shape))
                if errors.ndim < a.ndim:  # of a vector: its worst element
                    place = (*place, int(np.argmax(_difference(a[place], b[place]))))
                worst = Worst(runners, name, step, place, float(errors.max()), float(a[place]), float(b[place]))
    return worst


def within(tolerance: float, one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, bool]:
    """Whether each output of a step is the same, floats within the tolerance."""
    expected, got = settled(one), settled(other)
    limits = {name: tolerance * (a.dtype.kind == "f") for name, a in expected.items()}
    return {name: bool((distance(a, got[name]) <= limits[name]).all()) for name, a in expected.items()}


def settled(outputs: Mapping[str, Any]) -> Tensors:
    """A step's outputs, zero where a step leaves what may be anything: behind each row's tokens, path and
    length, and log-probabilities that it did not ask for; with the report's scores as floats of their own."""
    arrays = {name: np.array(values) for name, values in outputs.items()}
    reports = [Report.split(row) for row in arrays.get("report", ())]
    if reports and reports[0].scored:
        arrays[SCORES] = np.array([report.scores for report in reports]) / SCORE_STEPS
    for report in reports:
        report.scores[:] = 0
        report.tokens[report.count :] = 0
        report.nodes[report.accepted + 1 :] = report.ranks[report.accepted + 1 :] = 0
        asked = (report.top_logprobs[:1] > LEAST_LOGPROB * LOGPROB_STEPS).any()
        report.logprobs[report.count * asked :] = 0
        report.top_tokens[report.count * TOP_LOGPROBS :] = report.top_logprobs[report.count * TOP_LOGPROBS :] = 0
    for row, length in enumerate(arrays.get(f"{NEXT}lengths", ())):
        for name, array in arrays.items():
            if name.startswith((f"{NEXT}keys.", f"{NEXT}values.")):
                array[row, :, length:] = 0
            elif name == f"{NEXT}history":
                array[row, length + 1 :] = 0
    return arrays


def distance(expected: NDArray[Any], got: NDArray[Any]) -> NDArray[np.float64]:
    """How far off each integer is, and each vector of floats (the last dimension): the norm of the difference, relative
    to the vector's own norm, or to the RMS of all vectors' norms where that is larger."""
    difference = _difference(expected, got)
    if expected.dtype.kind != "f":
        return difference
    norms = np.linalg.norm(difference, axis=-1)
    sizes = np.linalg.norm(np.where(np.isfinite(expected), expected, 0).astype(np.float64), axis=-1)
    scale = np.maximum(sizes, np.sqrt((sizes**2).mean())) if sizes.size else sizes
    return np.divide(norms, scale, out=np.where(norms > 0, np.inf, 0.0), where=scale > 0)


def _difference(expected: NDArray[Any], got: NDArray[Any]) -> NDArray[np.float64]:
    """Element by element; infinite where one alone is not a number."""
    a, b = expected.astype(np.float64), got.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(np.where(same, 0.0, np.abs(a - b)), nan=np.inf, posinf=np.inf)


def _torch_engine(directory: Path, model: str | None, drafter: str | None, progress: OnProgress) -> Engine:
    """The model itself, as an engine was configured. Raises InputError for another model."""
    manifest = read_manifest(directory)
    name = model or manifest.about["model"]["name"]
    progress(f"loading {name}")
    fields = {field.name for field in dataclasses.fields(EngineConfig)} - set(OF_BACKEND)
    options: Any = {name: manifest.spec.config[name] for name in fields}
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
    options = {name: value for name, value in spec.config.items() if name not in NOT_OF_STEP}
    drafters = [Path(name).name for name in options["drafter"].split(",")]
    choices = options["tree_choices"]
    return options | {"drafter": drafters, "tree_choices": choices and Path(choices).name}


def compared(spec: EngineSpec) -> list[str]:
    """What a step changes, as ONNX files name it. In half precision less the next draft tree, whose nodes follow close
    scores: rounding swaps them, and no token depends on it."""
    changing = {*spec.step.outputs, "history"} | {tensor.name for tensor in (*spec.shared, *spec.caches)}
    if spec.config["dtype"] != "float32":
        changing -= {"tree_tokens", "tree_parents"}
    return ["report", *(NEXT + tensor.name for tensor in _layout(spec) if tensor.name in changing)]
