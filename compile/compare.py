"""Compare what runs an ONNX engine's step: torch, ONNX Runtime and, where it can, TensorRT, through polygraphy."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from polygraphy.backend.base import BaseRunner
from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx
from polygraphy.common import TensorMetadata
from polygraphy.comparator import Comparator, SimpleCompareFunc
from polygraphy.logger import G_LOGGER

from ..runtime.engine import Engine, load
from ..runtime.engine_file import EngineSpec, read_manifest
from ..runtime.errors import InputError
from ..runtime.onnx_session import PROVIDERS, OnnxSession
from .assemble import assemble
from .config import EngineConfig
from .onnx import FunctionalProgram
from .source import load_source

PROMPT = "List three facts about light, then list them again."
TOLERANCE = {"float32": 1e-3, "float16": 3e-2}

Feed = dict[str, NDArray[Any]]


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


class StepRunner(BaseRunner):
    """The torch step as a polygraphy runner."""

    def __init__(self, program: FunctionalProgram, spec: EngineSpec):
        super().__init__(name="torch")
        self.program, self.spec = program, spec

    def get_input_metadata_impl(self) -> TensorMetadata:
        tensors = {tensor.name: tensor for tensor in (*self.spec.state, *self.spec.caches)}
        metadata = TensorMetadata()
        for name in self.program.inputs:
            sizes = [None if name in self.program.caches and i == 2 else n for i, n in enumerate(tensors[name].shape)]
            metadata.add(name, np.dtype(tensors[name].dtype), sizes)
        return metadata

    def infer_impl(self, feed_dict: Feed) -> Feed:
        started = time.perf_counter()
        with torch.no_grad():
            outputs = self.program(*(torch.from_numpy(feed_dict[name].copy()) for name in self.program.inputs))
        self.inference_time = time.perf_counter() - started
        return {name: out.numpy() for name, out in zip(self.program.output_names, outputs, strict=True)}


def compare(
    directory: str | Path,
    model: str | None = None,
    steps: int = 8,
    save: str | Path | None = None,
    report: Callable[[str], None] = lambda message: None,
) -> Comparison:
    """Replay recorded steps of a real generation on every runner.

    model: what the engine was built from, by default what the manifest says. save: folder for the inputs and outputs
    as polygraphy JSON. Raises InputError for an engine of another backend.
    """
    directory = Path(directory)
    spec = read_manifest(directory).spec
    if spec.config["backend"] != "onnx":
        raise InputError(f"engine: expected one of backend onnx, got {spec.config['backend']}")
    report("recording steps")
    feeds = record(load(directory), steps)
    runners: list[BaseRunner] = [StepRunner(_torch_step(directory, spec, model, report), spec)]
    runners.append(OnnxrtRunner(SessionFromOnnx(str(directory / spec.step.file), PROVIDERS), name="onnxruntime"))
    report(f"comparing {' and '.join(runner.name for runner in runners)} on {len(feeds)} steps")
    paths: dict[str, str] = {}
    if save is not None:
        Path(save).mkdir(parents=True, exist_ok=True)
        paths = {f"save_{kind}_path": str(Path(save) / f"{kind}.json") for kind in ("inputs", "outputs")}
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        results = Comparator.run(runners, data_loader=feeds, **paths)
        tolerance = TOLERANCE[spec.config["dtype"]]
        function = SimpleCompareFunc(atol=tolerance, rtol=tolerance)
        agree = bool(Comparator.compare_accuracy(results, compare_func=function))
    named = {name: list(iterations) for name, iterations in results}
    first, *others = named
    return Comparison(agree, len(feeds), [worst_output((first, other), named[first], named[other]) for other in others])


def record(engine: Engine, steps: int) -> list[Feed]:
    """Generate in all rows -> copies of everything that each of the first steps reads."""
    session = engine.session
    assert isinstance(session, OnnxSession)
    length = session.spec.max_seq_len
    tokens = engine.text.encode(PROMPT, chat=False) if engine.text else [2, 3, 4, 5] * 6
    for row in range(session.spec.max_batch):  # rows of different lengths
        session.admit(row, (tokens[: max(1, len(tokens) - row)])[: length - 2], length, session.spec.stop_ids)
    feeds = []
    for _ in range(steps):
        inputs = session.inputs()
        feeds.append({name: inputs[name].copy() for name in session.spec.step.inputs})
        session.step()
    for row in range(session.spec.max_batch):
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


def _torch_step(
    directory: Path, spec: EngineSpec, model: str | None, report: Callable[[str], None]
) -> FunctionalProgram:
    """The step from the model itself, as the engine was configured. Raises InputError for another model."""
    name = model or read_manifest(directory).about["model"]["name"]
    report(f"loading {name}")
    options = {field.name: spec.config[field.name] for field in dataclasses.fields(EngineConfig)}
    config = EngineConfig(**options)
    graphs = assemble(load_source(name, config.dtype, config.device), config)
    if (graphs.spec.state, graphs.spec.caches) != (spec.state, spec.caches):
        raise InputError(f"model: expected the one that {directory} was built from, got {name}; name it with --model")
    return FunctionalProgram(graphs.step)
