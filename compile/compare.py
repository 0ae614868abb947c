"""Compare engines' steps with torch's, on recorded steps of a real generation, through polygraphy."""

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata
from polygraphy.comparator import Comparator, SimpleCompareFunc
from polygraphy.logger import G_LOGGER

from ..runtime.engine import Engine, load
from ..runtime.engine_file import NEXT, EngineSpec, read_manifest
from ..runtime.errors import InputError
from ..runtime.session import Session, Tensors
from .config import EngineConfig
from .jit import eager

PROMPT = "List three facts about light, then list them again."
TOLERANCE = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 2e-1}  # of floats; integers must be equal
NOT_OF_STEP = ("backend", "device", "compute_capability", "plugins", "prefill_chunk")  # options that leave it as it is


class Worst(NamedTuple):
    """Where two runners differ most: output `name` of step `step`, at `place`."""

    runners: tuple[str, str]
    name: str
    step: int
    place: tuple[int, ...]
    expected: float
    got: float


class Comparison(NamedTuple):
    """Whether all runners agree, on how many steps, and for each pair the worst output."""

    agree: bool
    steps: int
    worst: list[Worst]


class SessionRunner(BaseRunner):
    """A session's step as a polygraphy runner. Its inputs are what `Session.read` gives."""

    def __init__(self, name: str, session: Session, outputs: Collection[str]):
        """outputs: `next.X` for input X as it is after the step, and the report."""
        super().__init__(name=name)
        self.session, self.outputs = session, outputs

    def activate_impl(self) -> None:
        """Nothing to open."""

    def get_input_metadata_impl(self) -> TensorMetadata:
        metadata = TensorMetadata()
        for name, array in self.session.read(1, self.session.spec.slot_step).items():
            metadata.add(name, array.dtype, [None] * array.ndim)
        return metadata

    def infer_impl(self, feed_dict: Tensors) -> Tensors:
        rows, _, slots, _ = feed_dict[self.session.spec.caches[0].name].shape
        self.session.write(feed_dict)
        started = time.perf_counter()
        report = self.session.replay(rows, slots)
        self.inference_time = time.perf_counter() - started
        after: Tensors = self.session.read(rows, slots) | {"report": np.array(report)}
        return {name: after[name.removeprefix(NEXT)] for name in self.outputs}


def compare(
    directories: Sequence[str | Path],
    model: str | None = None,
    steps: int = 8,
    save: str | Path | None = None,
    report: Callable[[str], None] = lambda message: None,
) -> Comparison:
    """Replay recorded steps of a real generation in torch and in engines of the same configuration, of any backend.

    model: what the engines were built from, by default what the first one's manifest says. save: folder for the inputs
    and outputs as polygraphy JSON. Raises InputError for engines or a model that do not fit together.
    """
    report(f"loading {', '.join(map(str, directories))}")
    sessions = {Path(directory): load(directory).session for directory in directories}
    _check_same_step({directory: session.spec for directory, session in sessions.items()})
    reference = _torch_engine(next(iter(sessions)), model, report)
    report(f"recording {steps} steps")
    feeds = record(reference, steps)
    outputs = _outputs(reference.spec)
    runners = [SessionRunner("torch", reference.session, outputs)]
    for directory, session in sessions.items():
        backend = session.spec.config["backend"]
        name = f"{backend} {directory}" if len(sessions) > 1 else backend
        runners.append(SessionRunner(name, session, outputs))
    report(f"comparing {' and '.join(runner.name for runner in runners)}")
    paths: dict[str, str] = {}
    if save is not None:
        Path(save).mkdir(parents=True, exist_ok=True)
        paths = {f"save_{kind}_path": str(Path(save) / f"{kind}.json") for kind in ("inputs", "outputs")}
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        results = Comparator.run(runners, data_loader=feeds, **paths)
        tolerance = TOLERANCE[reference.spec.config["dtype"]]
        bounds = {name: tolerance * is_float for name, is_float in outputs.items()}
        function = SimpleCompareFunc(atol=bounds, rtol=bounds)
        agree = bool(Comparator.compare_accuracy(results, compare_func=function))
    named = {name: list(iterations) for name, iterations in results}
    first, *others = named
    return Comparison(agree, len(feeds), [worst_output((first, other), named[first], named[other]) for other in others])


def record(engine: Engine, steps: int) -> list[Tensors]:
    """Generate -> what each step reads: half of the steps with every row, half with the first alone."""
    session, feeds = engine.session, list[Tensors]()
    length = session.spec.max_seq_len
    tokens = engine.text.encode(PROMPT, chat=False) if engine.text else [2, 3, 4, 5] * 6
    batch = session.spec.max_batch
    for rows, count in ((batch, steps - steps // 2), (1, steps // 2)):
        if not count:
            continue
        for row in range(rows):  # of different lengths
            session.admit(row, (tokens[: max(1, len(tokens) - row)])[: length - 2], length, session.spec.stop_ids)
        for _ in range(count):
            feeds.append(session.read(*session.next_size()))
            session.step()
        for row in range(rows):
            session.release(row)
    return feeds


def worst_output(runners: tuple[str, str], one: Sequence[Any], other: Sequence[Any]) -> Worst:
    """The element where two runners' iterations differ most, relative to its size where that is above 1."""
    worst, most = Worst(runners, "", 0, (), 0.0, 0.0), -1.0
    for step, (expected, got) in enumerate(zip(one, other, strict=True)):
        for name in expected:
            a, b = (np.asarray(values[name]).astype(np.float64) for values in (expected, got))
            with np.errstate(invalid="ignore"):
                error = np.abs(a - b) / np.maximum(np.abs(a), 1.0)
            error[np.isnan(error)] = np.inf
            error[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0  # infinities too
            if error.size and error.max() > most:
                index = np.unravel_index(int(np.argmax(error)), error.shape)
                place = tuple(int(i) for i in index)
                worst, most = Worst(runners, name, step, place, float(a[index]), float(b[index])), float(error[index])
    return worst


def _torch_engine(directory: Path, model: str | None, report: Callable[[str], None]) -> Engine:
    """The model itself, as an engine was configured. Raises InputError for another model."""
    manifest = read_manifest(directory)
    name = model or manifest.about["model"]["name"]
    report(f"loading {name}")
    options = {field.name: manifest.spec.config[field.name] for field in dataclasses.fields(EngineConfig)}
    engine = eager(name, **options)
    if (engine.spec.state, engine.spec.caches) != (manifest.spec.state, manifest.spec.caches):
        raise InputError(f"model: expected the one that {directory} was built from, got another; name it with --model")
    return engine


def _check_same_step(specs: Mapping[Path, EngineSpec]) -> None:
    """All have the step and the state of the first. Raises InputError."""
    (first, expected), *others = specs.items()
    for directory, spec in others:
        ours, theirs = _step_options(expected), _step_options(spec)
        odd = [name for name in ours if theirs[name] != ours[name]]
        if odd or (spec.state, spec.caches) != (expected.state, expected.caches):
            raise InputError(
                f"engine: expected the model and the step of {first}, got others in {directory}: "
                f"{', '.join(odd) or 'the model'} differs"
            )


def _step_options(spec: EngineSpec) -> dict[str, Any]:
    """What a step was built with; files by their names, wherever they were."""
    options = {name: value for name, value in spec.config.items() if name not in NOT_OF_STEP}
    drafters = [Path(name).name for name in options["drafter"].split(",")]
    choices = options["tree_choices"]
    return options | {"drafter": drafters, "tree_choices": choices and Path(choices).name}


def _outputs(spec: EngineSpec) -> dict[str, bool]:
    """What a step changes, as ONNX files name it -> whether it is of a floating type."""
    changing = {*spec.step.outputs, "history"} | {tensor.name for tensor in spec.caches}
    tensors = [tensor for tensor in (*spec.state, *spec.caches) if tensor.name in changing]
    return {"report": False} | {NEXT + tensor.name: "float" in tensor.dtype for tensor in tensors}
