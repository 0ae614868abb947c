"""The picture of `specstep profile`."""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from .profile_page import TableRow, op_rows, stage_rows, summary
from .tree_svg import COLOURS, STYLE

if TYPE_CHECKING:
    from ..runtime.inductor.profile import Profile

LEFT, WIDE, RIGHT, LINE = 340, 520, 150, 20  # pixels: labels, the longest bar, numbers, from line to line
OTHER = "#d0d0d0"  # what belongs to no stage of the graph


def draw(title: str, profiles: "Sequence[Profile]") -> str:
    """A panel for each profile -> an SVG page: the stages as one bar, then a bar for each op and each of its places, in
    the colours of their stages, with a mark where one read of the same bytes from memory would end."""
    width, y = LEFT + WIDE + RIGHT, 24
    scale = WIDE / max(profile.recorded_s for profile in profiles)
    body = [_text(12, y, title, bold=True), *_legend([row.label for row in stage_rows(profiles)], y + LINE)]
    y += LINE
    for index in range(len(profiles)):
        panel, y = _panel(profiles, index, scale, y + 2 * LINE)
        body += panel
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + LINE}" {STYLE}>'
    return "\n".join([head, f'<rect width="{width}" height="{y + LINE}" fill="white"/>', *body, "</svg>\n"])


def _legend(stages: Sequence[str], y: int) -> list[str]:
    lines = []
    for index, stage in enumerate(stages):
        lines += [_rect(12 + 90 * index, y, 14, stage), _text(32 + 90 * index, y, stage)]
    x = 12 + 90 * len(stages)
    return [*lines, _mark(x + 7, y), _text(x + 20, y, "one read of the same bytes from memory")]


def _panel(profiles: "Sequence[Profile]", index: int, scale: float, y: int) -> tuple[list[str], int]:
    """One profile from a height on -> its elements, and the height of the last line."""
    profile = profiles[index]
    lines, x = [_text(12, y, summary(profile))], float(LEFT)
    y += LINE
    for stage in stage_rows(profiles):
        seconds = stage.seconds[index]
        lines.append(_rect(x, y, seconds * scale, stage.label))
        if seconds * scale > 40:
            lines.append(_text(x + 4, y, f"{seconds / profile.recorded_s:.1%}", size=11))
        x += seconds * scale
    y += LINE // 2
    for op, places in op_rows(profiles)[0]:
        y += LINE
        lines += [_text(12, y, f"{op.label} × {op.calls}", bold=True), *_bar(op, profile, index, scale, y)]
        for place in places:
            y += LINE
            lines += [_text(24, y, f"{place.label} × {place.calls}"), *_bar(place, profile, index, scale, y)]
    return lines, y


def _bar(row: TableRow, profile: "Profile", index: int, scale: float, y: int) -> list[str]:
    lines, x, seconds, read = [], float(LEFT), row.seconds[index], row.read[index]
    for stage in row.split(lambda part: part.stage):
        lines.append(_rect(x, y, stage.seconds[index] * scale, stage.label))
        x += stage.seconds[index] * scale
    told = f"{seconds * 1e3:.2f} ms, {seconds / profile.recorded_s:.1%}"
    if read is not None and seconds:
        told += f", {read / seconds / 1e9:.0f} GB/s"
        end = LEFT + read * profile.read_s / profile.weights * scale
        lines.append(_mark(end, y))
        x = max(x, end)
    return [*lines, _text(x + 6, y, told, size=11)]


def _rect(x: float, y: int, width: float, stage: str) -> str:
    colour = COLOURS.get(stage, OTHER)
    return f'<rect x="{x:.1f}" y="{y - 12}" width="{width:.1f}" height="14" fill="{colour}"/>'


def _mark(x: float, y: int) -> str:
    return f'<line x1="{x:.1f}" y1="{y - 14}" x2="{x:.1f}" y2="{y + 3}" stroke="black" stroke-width="2"/>'


def _text(x: float, y: int, text: str, size: int = 12, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}"{weight}>{escape(text)}</text>'
