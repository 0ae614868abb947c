"""The picture of `specstep bench-acceptance`."""

import importlib.util
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    from ..runtime.acceptance import Acceptance

COLOUR, LIGHT = "#2f6fb0", "#b9d0e8"


def require_matplotlib() -> None:
    """Raises InputError when it is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError('png: expected matplotlib, got none; install it: pip install "specstep[plot]"')


def draw(file: str, groups: "dict[str, Acceptance]", title: str, courses: dict[str, list[float]]) -> None:
    """Tokens per step of each category, shares of steps by depth, tokens per step by the size of the tree, and how many
    nodes were verified over the course of an answer, as a PNG. `groups` holds "all" and the categories, as does
    `courses` (see `stats.course`). Raises InputError when the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left")
    categories, depths, nodes, chosen = figure.subplots(1, 4)
    whole = groups["all"]
    _categories(categories, groups)
    _depths(depths, whole.by_depth())
    _nodes(nodes, whole.by_node())
    _courses(chosen, courses)
    for axes in (categories, depths, nodes, chosen):
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(file, format="png", dpi=150)
    except OSError as error:
        raise InputError(f"png: expected a path that can be written, got {file}: {error.strerror}") from None


def _categories(axes: Any, groups: "dict[str, Acceptance]") -> None:
    names = list(reversed(groups))
    values = [groups[name].tokens_per_step for name in names]
    bars = axes.barh(names, values, color=[COLOUR if name == "all" else LIGHT for name in names])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.set_xlim(0, 1.15 * max(values))
    axes.set_title("tokens per step", loc="left", fontsize="medium")


def _depths(axes: Any, shares: list[float]) -> None:
    bars = axes.bar(range(1, len(shares) + 1), shares, color=LIGHT)
    axes.bar_label(bars, labels=[f"{share:.0%}" for share in shares], padding=2, fontsize="small")
    axes.set_title("share of steps that reach a depth", loc="left", fontsize="medium")
    axes.set_xlabel("depth")
    _whole_numbers(axes, len(shares))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _nodes(axes: Any, shares: list[float]) -> None:
    """What the first n nodes of the tree would give: of a dynamic tree, the n best."""
    reached = [1.0]
    for share in shares:
        reached.append(reached[-1] + share)
    axes.plot(range(len(reached)), reached, color=COLOUR, marker="o", markersize=3)
    axes.set_title("tokens per step with the first n nodes", loc="left", fontsize="medium")
    axes.set_xlabel("n")
    axes.set_ylim(bottom=1)
    axes.grid(axis="y", color="#dddddd")
    _whole_numbers(axes, len(shares))


def _courses(axes: Any, courses: dict[str, list[float]]) -> None:
    for name, means in reversed(courses.items()):
        places = [(place + 0.5) / len(means) for place in range(len(means))]
        wide = {"color": COLOUR, "linewidth": 2} if name == "all" else {"linewidth": 0.8}
        axes.plot(places, means, label=name, **wide)
    axes.set_title("nodes verified, from first to last step", loc="left", fontsize="medium")
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend(frameon=False, fontsize="small")


def _whole_numbers(axes: Any, most: int) -> None:
    step = -(-max(most, 1) // 12)
    axes.set_xticks(range(0 if step > 1 else 1, most + 1, step))
