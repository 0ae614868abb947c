"""Where recorded outputs of steps differ."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..controls import TOP_LOGPROBS
from ..report import LEAST_LOGPROB, LOGPROB_STEPS, SCORE_STEPS, Report
from ..runtime.buffers import Tensors
from ..runtime.engine_file import NEXT

SCORES = "scores"  # what those of a report are called beside its integers


class Worst(NamedTuple):
    """Where two runners differ most."""

    runners: tuple[str, str]  # the reference, and the one compared with it
    name: str  # of the output; "": none to compare
    step: int  # number of the recorded step, from 0
    place: tuple[int, ...]  # index of the element
    error: float  # `distance` at it
    expected: float  # the reference's value
    got: float  # the other's


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
