"""The table of `specstep tune`."""

import itertools
from collections.abc import Mapping
from typing import Any

SHOWN = (1, 3, 7, 15, 31)  # nodes
CELL = 15  # columns of what is expected at a number of rows


def describe(result: Mapping[str, Any]) -> str:
    """What `tune` returns, for a terminal: what is accepted, what steps take, what is expected, what is chosen."""
    width = 2 + max(10, *(len(drafter["name"]) for drafter in result["drafters"]))  # columns of a drafter's name
    tables = [make(result, width) for make in (_accepted, _steps, _expected)]
    return "\n".join([line for table in tables for line in [*table, ""]] + _choices(result))


def _accepted(result: Mapping[str, Any], width: int) -> list[str]:
    rungs = [nodes for nodes in SHOWN if any(nodes in drafter["rungs"] for drafter in result["drafters"])]
    lines = ["tokens per step with the first n nodes of the tree", f"{'':<{width}}" + _cells(rungs, "{}")]
    for drafter in result["drafters"]:
        known = [nodes for nodes in rungs if nodes in drafter["rungs"]]  # a shallow tree has fewer
        values = [drafter["tokens_per_step"][drafter["rungs"].index(nodes)] for nodes in known]
        lines.append(f"{drafter['name']:<{width}}" + _cells(values, "{:.2f}"))
    return lines


def _steps(result: Mapping[str, Any], width: int) -> list[str]:
    lines = ["ms of a step that verifies n nodes; of these, the drafter"]
    for drafter in (each for each in result["drafters"] if each["built"]):
        rungs = [nodes for nodes in (0, *SHOWN) if nodes in drafter["rungs"]]
        lines.append(f"{drafter['name']:<{width}}" + _cells(rungs, "{}") + f"{'drafter':>9}")
        for at in drafter["by_rows"]:
            times = [1e3 * at["step_s"][drafter["rungs"].index(nodes)] for nodes in rungs]
            cells = _cells(times, "{:.1f}") + f"{1e3 * at['draft_s']:>9.1f}"
            lines.append(f"  {_rows(at['rows']):<{width - 2}}" + cells)
    return lines


def _expected(result: Mapping[str, Any], width: int) -> list[str]:
    lines = [
        "tokens/s expected of all rows, against plain decoding, and the nodes that pay most",
        f"{'':<{width}}" + "".join(f"{_rows(at['rows']):>{CELL}}" for at in result["plain"]),
        f"{'plain':<{width}}" + "".join(f"{at['tokens_per_s']:>{CELL}.0f}" for at in result["plain"]),
    ]
    for drafter in result["drafters"]:
        cells = [f"{at['tokens_per_s']:.0f} {at['speed']:.2f}x {at['nodes']:>2}" for at in drafter["by_rows"]]
        most = "" if drafter["built"] else "  estimated, no engine was built"
        lines.append(f"{drafter['name']:<{width}}" + "".join(f"{cell:>{CELL}}" for cell in cells) + most)
    return lines


def _choices(result: Mapping[str, Any]) -> list[str]:
    """A line for each choice, with the engines that it is for."""
    options = ("drafter", "nodes", "depth", "top_k")
    lines = []
    for _, same in itertools.groupby(result["choices"], lambda choice: [choice[name] for name in options]):
        first, *more = same
        most = (more or [first])[-1]["max_batch"]
        engines = _rows(most) if first["max_batch"] == most else f"{first['max_batch']} to {most} rows"
        lines.append(f"tuned for engines of {engines}: {first['because']}")
    return lines


def _rows(rows: int) -> str:
    return f"{rows} row{'s' * (rows > 1)}"


def _cells(values: list[Any], form: str) -> str:
    return "".join(f"{form.format(value):>7}" for value in values)
