"""How fast one replica is, from what was measured of engines: results/steps.json and results/engines.json."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parents[1] / "results"
NODES = 4  # that a step of one row verified best when these were measured; more rows verify these or none


@dataclass(frozen=True)
class Speed:
    """A step takes `fixed_ms`, `verified_ms` for each token that it verifies in all rows, and `kept_ms` for each token
    in their caches. drafted: tokens that a step brings a row with NODES drafts; prompt_s: prompt tokens a second.
    error: of the fit, root mean square, relative."""

    fixed_ms: float
    verified_ms: float
    kept_ms: float
    drafted: float
    prompt_s: float
    error: float

    def step(self, rows: int, kept: float) -> tuple[float, float]:
        """The better of a step with drafts and one without, for so many rows with so many tokens in their caches ->
        seconds, and tokens for each row."""
        plain, drafts = self._seconds(rows, kept), self._seconds(rows * (NODES + 1), kept)
        return (drafts, self.drafted) if self.drafted / drafts > 1 / plain else (plain, 1.0)

    def _seconds(self, verified: int, kept: float) -> float:
        return (self.fixed_ms + self.verified_ms * verified + self.kept_ms * kept) / 1e3


def measured(weights: str = "auto") -> Speed:
    """Of the default model's engine with these weights and the default drafter, on the machine of steps.json."""
    steps = [step for step in _read("steps")["steps"] if step["weights"] == weights]
    times = np.array([step["step_ms"] for step in steps])
    terms = np.array([[1, step["rows"] * (step["nodes"] + 1), step["rows"] * step["tokens"]] for step in steps])
    fitted = np.linalg.lstsq(terms / times[:, None], np.ones(len(times)), rcond=None)[0]
    error = float(np.sqrt(np.mean((terms @ fitted / times - 1) ** 2)))
    engine = next(one for one in _read("engines")["engines"] if one["name"] == f"specstep {weights} default")
    return Speed(*map(float, fitted), engine["per_step"], engine["prompt_s"], error)


def served(weights: str = "auto") -> dict[int, float]:
    """Tokens a second of the server by the number of clients, from results/serve.json."""
    loads = _read("serve")["loads"]
    return {load["clients"]: load["tokens_s"] for load in loads if load["engine"] == f"specstep {weights} default"}


def _read(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())
