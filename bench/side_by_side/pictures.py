"""The pictures: tokens/s by engine, and steps over cache length, nodes and rows."""

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .batches import Batch
from .loads import Load
from .summary import SummaryRow, baseline

OURS, PEER, INK, FAINT = "#2f6fb0", "#a4a9af", "#2b2f33", "#dfe2e6"
PRECISIONS = {"bf16": "#2f6fb0", "int8": "#d07a2d", "int4": "#3f9160", "auto": "#8a5fb5"}
DASHES = (0, (4, 3))


def draw_engines(file: Path, rows: Sequence[SummaryRow], title: str) -> None:
    """Horizontal bars, the fastest at the top. Plain decoding is paler; a thin line spans the single repeats."""
    ordered, base = sorted(rows, key=lambda row: row.tokens_s), baseline(rows)
    longest = max(row.fastest for row in rows)
    figure = _figure(9.0, 1.5 + 0.31 * len(rows))
    axes = figure.subplots()
    for place, row in enumerate(ordered):
        ours, plain = row.contender.family == "specstep", row.contender.drafts == "none"
        axes.barh(place, row.tokens_s, height=0.7, color=OURS if ours else PEER, alpha=0.5 if plain else 1.0)
        axes.plot([row.slowest, row.fastest], [place, place], color=INK, linewidth=1.2, solid_capstyle="butt")
        text = axes.text(
            max(row.fastest, row.tokens_s) + longest / 80, place, _speed(row, base), va="center", color=INK
        )
        text.set(weight="bold" if ours else "normal", bbox={"color": "white", "pad": 1.0})
    axes.axvline(base.tokens_s, color=INK, linewidth=0.9, linestyle=DASHES, zorder=0)
    axes.set_yticks(range(len(ordered)), [row.name for row in ordered])
    for tick, row in zip(axes.get_yticklabels(), ordered, strict=True):
        tick.set_color(OURS if row.contender.family == "specstep" else INK)
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, 1.2 * longest), ylim=(-0.6, len(ordered) - 0.4))
    axes.set_xlabel(
        f"tokens per second while decoding, and over {base.name} (dashed line)\n"
        "thin lines: the single repeats; pale bars: plain decoding, without drafts"
    )
    axes.grid(axis="x", color=FAINT, linewidth=0.7)
    _finish(figure, [axes], title, file)


def draw_batches(file: Path, batches: Sequence[Batch], title: str) -> None:
    """A group of bars for each number of rows, ours in colour."""
    engines = list(dict.fromkeys(batch.engine for batch in batches))
    counts = sorted({batch.rows for batch in batches})
    speeds = {(batch.engine, batch.rows): batch.tokens_s for batch in batches}
    figure = _figure(9.0, 4.4)
    panels = figure.subplots(1, len(counts), squeeze=False)[0]
    for axes, rows in zip(panels, counts, strict=True):
        values = [speeds.get((engine, rows), 0.0) for engine in reversed(engines)]
        colours = [OURS if engine.startswith("specstep") else PEER for engine in reversed(engines)]
        bars = axes.barh(list(reversed(engines)), values, height=0.7, color=colours)
        axes.bar_label(bars, fmt="%.0f", padding=3, color=INK, fontsize="small")
        axes.set(xlim=(0, 1.25 * max(values)), title=f"{rows} row{'s' * (rows > 1)}", xlabel="tokens per second")
        axes.title.set_size("medium")
        axes.tick_params(axis="y", length=0, labelleft=axes is panels[0])
        axes.grid(axis="x", color=FAINT, linewidth=0.7)
    _finish(figure, panels, title, file)


def draw_loads(file: Path, loads: Sequence[Load], title: str) -> None:
    """Tokens per second, and the wait for the first text, over the number of clients; ours in colour."""
    figure = _figure(9.0, 4.4)
    panels = figure.subplots(1, 2)
    engines = list(dict.fromkeys(load.engine for load in loads))
    markers = dict(zip(engines, "oosD^vPX", strict=False))
    for engine in engines:
        line = [load for load in loads if load.engine == engine]
        style = {"color": OURS if engine.startswith("specstep") else PEER, "marker": markers[engine], "label": engine}
        clients = [load.clients for load in line]
        panels[0].plot(clients, [load.tokens_s for load in line], linewidth=1.8, markersize=4, **style)
        panels[1].plot(clients, [1e3 * load.first_s[0] for load in line], linewidth=1.8, markersize=4, **style)
    for axes, name in zip(panels, ("tokens per second, all clients", "ms to the first text, median"), strict=True):
        axes.set(xlabel="clients", ylabel=name, xticks=sorted({load.clients for load in loads}))
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color=FAINT, linewidth=0.7)
    panels[0].legend(frameon=False, fontsize="small")
    _finish(figure, list(panels), title, file)


def draw_steps(file: Path, steps: Sequence[dict[str, Any]], title: str) -> None:
    """Step time over cache length, nodes and rows. A dashed line is one read of those weights."""
    rows = [step for step in steps if step["rows"] > 1]
    tokens, nodes = (rows[0]["tokens"], rows[0]["nodes"]) if rows else (steps[0]["tokens"], steps[-1]["nodes"])
    single = [step for step in steps if step["rows"] == 1]
    first = single[0]["weights"]
    counts = sorted({step["nodes"] for step in single})
    shades = {count: _shade(place / max(len(counts) - 1, 1)) for place, count in enumerate(counts)}
    figure = _figure(12.5, 4.2)
    by_length, by_nodes, by_rows = figure.subplots(1, 3)
    _lines(by_length, _once(s for s in single if s["weights"] == first), "tokens", "nodes", shades.__getitem__)
    by_length.set(title=f"{first}, by drafted nodes, over the cache", xlabel="tokens in the cache")
    at = [step for step in single if step["tokens"] == tokens]
    _lines(by_nodes, _once(at), "nodes", "weights", PRECISIONS.__getitem__)
    by_nodes.set(title=f"over the drafted nodes, {tokens} tokens in the cache", xlabel="drafted nodes")
    at = [s for s in steps if s["tokens"] == tokens and s["nodes"] == nodes]
    _lines(by_rows, _once(at), "rows", "weights", PRECISIONS.__getitem__)
    by_rows.set(title=f"over the rows, {nodes} drafted nodes each", xlabel="rows in use")
    for axes in (by_length, by_nodes, by_rows):
        axes.set_ylim(bottom=0)
        axes.set_ylabel("ms per step")
        axes.title.set_size("medium")
        axes.grid(axis="y", color=FAINT, linewidth=0.7)
    _finish(figure, [by_length, by_nodes, by_rows], f"{title}. Dashed: one read of the weights", file)


def _lines(axes: Axes, steps: Sequence[dict[str, Any]], x: str, key: str, colour: Callable[[Any], str]) -> None:
    """A line for each value of `key`, named at its end, and a dashed one for the reads of its weights."""
    lines: dict[Any, list[dict[str, Any]]] = {}
    for step in sorted(steps, key=lambda step: step[x]):
        lines.setdefault(step[key], []).append(step)
    for value, line in lines.items():
        places, times = [step[x] for step in line], [step["step_ms"] for step in line]
        axes.plot(places, times, color=colour(value), marker="o", markersize=3.5, linewidth=1.8)
        read_colour = colour(value) if key == "weights" else INK
        axes.plot(places, [s["one_read_ms"] for s in line], color=read_colour, linewidth=1, linestyle=DASHES)
    ends = {_name(key, value): (line[-1], colour(value)) for value, line in lines.items()}
    heights = _apart([end["step_ms"] for end, _ in ends.values()], max(step["step_ms"] for step in steps) / 18)
    for (name, (end, shade)), height in zip(ends.items(), heights, strict=True):
        axes.annotate(name, (end[x], height), (7, 0), textcoords="offset points", va="center", color=shade)
    ticks: list[int] = []
    for tick in sorted({step[x] for step in steps}):
        if not ticks or tick - ticks[-1] > max(step[x] for step in steps) / 11:  # else their numbers touch
            ticks.append(tick)
    axes.set_xticks(ticks)
    axes.margins(x=0.17 if key == "nodes" else 0.1)


def _name(key: str, value: Any) -> str:
    return f"{value} node{'s' * (value != 1)}" if key == "nodes" else str(value)


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """Heights of labels, moved up where they would lie on one another."""
    placed: dict[int, float] = {}
    for index in sorted(range(len(heights)), key=heights.__getitem__):
        placed[index] = max(heights[index], max(placed.values(), default=-gap) + gap)
    return [placed[index] for index in range(len(heights))]


def _speed(row: SummaryRow, base: SummaryRow) -> str:
    return f"{row.tokens_s:.0f}   {row.tokens_s / base.tokens_s:.2f}×"


def _once(steps: Any) -> list[dict[str, Any]]:
    """The first of steps of the same kind: an engine for many rows was also timed with one."""
    found: dict[Hashable, dict[str, Any]] = {}
    for step in steps:
        found.setdefault((step["weights"], step["nodes"], step["rows"], step["tokens"]), step)
    return list(found.values())


def _shade(share: float) -> str:
    """From light to dark blue."""
    light, dark = (158, 196, 232), (18, 58, 104)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(light, dark, strict=True))


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _finish(figure: Figure, panels: Sequence[Axes], title: str, file: Path) -> None:
    for axes in panels:
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(PEER)
        axes.set_axisbelow(True)
        axes.tick_params(color=PEER)
    figure.suptitle(title, x=0.01, ha="left", fontsize="large", color=INK)
    figure.savefig(file, dpi=150)
