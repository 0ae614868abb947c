"""Compare engines' steps with torch's, on recorded steps of a real generation, through polygraphy."""

import dataclasses
import functools
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
FREE = ("backend", "device", "compute_capability", "plugins", "prefill_chunk")  # options that leave a step as it is


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

    def __init__(self, name: str, open_session: Callable[[], Session], outputs: Collection[str]):
        """outputs: `next.X` for input X as it is after the step, and the report."""
        super().__init__(name=name)
        self.open_session, self.outputs = open_session, outputs

    def activate_impl(self) -> None:
        self.session = self.open_session()

    def deactivate_impl(self) -> None:
        del self.session

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
    specs = {Path(directory): read_manifest(directory).spec for directory in directories}
    reference = _torch_engine(next(iter(specs)), model, report)
    _check_layouts(reference.spec, specs)
    report(f"recording {steps} steps")
    feeds = record(reference, steps)
    outputs = _outputs(reference.spec)
    runners = [SessionRunner("torch", lambda: reference.session, outputs)]
    for directory, spec in specs.items():
        name = f"{spec.config['backend']} {directory}" if len(specs) > 1 else spec.config["backend"]
        runners.append(SessionRunner(name, functools.partial(_load_session, directory), outputs))
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
            error = np.abs(a - b) / np.maximum(np.abs(a), 1.0)
            if error.size and not error.max() <= most:  # NaN too
                index = np.unravel_index(int(np.argmax(error)), error.shape)
                place = tuple(int(i) for i in index)
                worst, most = Worst(runners, name, step, place, float(a[index]), float(b[index])), float(error[index])
    return worst


def _torch_engine(directory: Path, model: str | None, report: Callable[[str], None]) -> Engine:
    """The model itself, as an engine was configured."""
    manifest = read_manifest(directory)
    name = model or manifest.about["model"]["name"]
    report(f"loading {name}")
    options = {field.name: manifest.spec.config[field.name] for field in dataclasses.fields(EngineConfig)}
    return eager(name, **options)


def _load_session(directory: Path) -> Session:
    return load(directory).session


def _check_layouts(reference: EngineSpec, specs: Mapping[Path, EngineSpec]) -> None:
    """All have the state of the first, and the model has it too. Raises InputError."""
    first = next(iter(specs))
    for directory, spec in specs.items():
        odd = [name for name, value in spec.config.items() if name not in FREE and value != specs[first].config[name]]
        if odd or (spec.state, spec.caches) != (specs[first].state, specs[first].caches):
            raise InputError(
                f"engine: expected the model and the step of {first}, got others in {directory}: "
                f"{', '.join(odd) or 'the model'} differs"
            )
    if (reference.state, reference.caches) != (specs[first].state, specs[first].caches):
        raise InputError(f"model: expected the one that {first} was built from, got another; name it with --model")


def _outputs(spec: EngineSpec) -> dict[str, bool]:
    """What a step changes, as ONNX files name it -> whether it is of a floating type."""
    changing = {*spec.step.outputs, "history"} | {tensor.name for tensor in spec.caches}
    tensors = [tensor for tensor in (*spec.state, *spec.caches) if tensor.name in changing]
    return {"report": False} | {NEXT + tensor.name: "float" in tensor.dtype for tensor in tensors}
