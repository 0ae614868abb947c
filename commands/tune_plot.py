"""The picture of `specstep tune`."""

import textwrap
from collections.abc import Mapping
from typing import Any

from ..errors import InputError

TITLE_WIDTH = 170  # characters
GREY, SHADES = "#888888", ("#b9d0e8", "#7fa9d3", "#4a86c2", "#1f5a96", "#123a63")


def draw(file: str, result: Mapping[str, Any], model: str) -> None:
    """Tokens per step by nodes, the time of a step by nodes and rows, and the speed that is expected by rows, as a PNG.
    Raises InputError when the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    title = textwrap.fill(f"{model}: {result['choices'][0]['because']}", TITLE_WIDTH)
    figure.suptitle(title, x=0.01, ha="left", fontsize="medium")
    accepted, steps, expected = figure.subplots(1, 3)
    _accepted(accepted, result)
    _steps(steps, result)
    _expected(expected, result)
    for axes in (accepted, steps, expected):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd")
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(0, -0.13))  # below all lines
    try:
        figure.savefig(file, format="png", dpi=150)
    except OSError as error:
        raise InputError(f"png: expected a path that can be written, got {file}: {error.strerror}") from None


def _accepted(axes: Any, result: Mapping[str, Any]) -> None:
    for drafter in result["drafters"]:
        tokens, name = drafter["tokens_per_step"], drafter["name"]
        axes.plot(drafter["rungs"], tokens, marker="o", markersize=3, label=name)
    axes.set_title("tokens per step\nwith the first n nodes", loc="left", fontsize="medium")
    axes.set_xlabel("n")
    axes.set_ylim(bottom=1)


def _steps(axes: Any, result: Mapping[str, Any]) -> None:
    """Of the engine that is chosen for one row, or of the first that was built."""
    built = [drafter for drafter in result["drafters"] if drafter["built"]]
    chosen = [drafter for drafter in built if drafter["drafter"] == result["choices"][0]["drafter"]]
    drafter = (chosen or built)[0]
    for place, at in enumerate(drafter["by_rows"]):
        times, label = [1e3 * seconds for seconds in at["step_s"]], f"{at['rows']} row{'s' * (at['rows'] > 1)}"
        axes.plot(drafter["rungs"], times, color=SHADES[place % len(SHADES)], marker="o", markersize=3, label=label)
    axes.set_title(f"ms of a step with n nodes\n{drafter['name']}", loc="left", fontsize="medium")
    axes.set_xlabel("n")
    axes.set_ylim(bottom=0)


def _expected(axes: Any, result: Mapping[str, Any]) -> None:
    places, built = range(len(result["plain"])), [drafter for drafter in result["drafters"] if drafter["built"]]
    width = 0.8 / (1 + len(built))
    series: list[tuple[str, list[float], str | None]] = [
        ("plain", [at["tokens_per_s"] for at in result["plain"]], GREY)
    ]
    series += [(each["name"], [at["tokens_per_s"] for at in each["by_rows"]], None) for each in built]
    for place, (name, values, colour) in enumerate(series):
        bars = axes.bar([at + place * width for at in places], values, width, label=name, color=colour)
        axes.bar_label(bars, fmt="%.0f", padding=2, fontsize="small")
    axes.margins(y=0.1)  # room for the numbers
    axes.set_xticks([at + width * len(built) / 2 for at in places], [str(at["rows"]) for at in result["plain"]])
    axes.set_title("tokens/s expected\nnodes chosen as it runs", loc="left", fontsize="medium")
    axes.set_xlabel("rows")
