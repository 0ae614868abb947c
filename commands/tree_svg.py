"""Draw an engine's tree and the stages of its step."""

from typing import Any

STYLE = 'font-family="sans-serif" font-size="12"'
COLOURS = {"verify": "#ffb86b", "accept": "#8fd694", "commit": "#c9a7f5", "draft": "#7eb6ff"}
STEP, LEVEL, RADIUS = 34, 54, 11


def draw(tree: dict[str, Any], stages: dict[str, dict[str, int]]) -> str:
    """`about.tree` and `about.stages` of a manifest -> an SVG page. A dynamic tree is drawn as its levels: how many
    nodes each expands."""
    body, width, height = _tree(tree)
    bars = [_bar(kind, stages, height + 30 + 46 * row) for row, kind in enumerate(("nodes", "parameters"))]
    width, height = max(width, 520), height + 46 * len(bars) + 40
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {STYLE}>'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *body, *bars, "</svg>\n"])


def _tree(tree: dict[str, Any]) -> tuple[list[str], int, int]:
    paths = [tuple(path) for path in tree["paths"] or _level_paths(tree)]
    places = _places([(), *paths])
    title = f"{tree['kind']} tree: {tree['nodes']} nodes, depth {tree['depth']}, top-k {tree['top_k']}"
    lines, nodes = [f'<text x="12" y="20" font-weight="bold">{title}</text>'], []
    for path, (x, y) in places.items():
        if path:
            up = places[path[:-1]]
            lines.append(f'<line x1="{up[0]}" y1="{up[1]}" x2="{x}" y2="{y}" stroke="#999"/>')
        label = str(path[-1]) if path else "root"
        nodes.append(f'<circle cx="{x}" cy="{y}" r="{RADIUS}" fill="{COLOURS["draft" if path else "verify"]}"/>')
        nodes.append(f'<text x="{x}" y="{y + 4}" text-anchor="middle" font-size="10">{label}</text>')
    width = int(max(x for x, _ in places.values())) + 40
    return lines + nodes, width, int(max(y for _, y in places.values())) + 30


def _level_paths(tree: dict[str, Any]) -> list[tuple[int, ...]]:
    """A dynamic tree before its scores are known: each level's expanded nodes, below the first node of the level
    above."""
    paths: list[tuple[int, ...]] = []
    for level in range(tree["depth"]):
        paths += [(*(0,) * level, rank) for rank in range(tree["top_k"])]
    return paths


def _places(paths: list[tuple[int, ...]]) -> dict[tuple[int, ...], tuple[float, float]]:
    """Leaves side by side, every parent above the middle of its children."""
    places: dict[tuple[int, ...], tuple[float, float]] = {}
    leaves = 0
    for path in sorted(paths, key=lambda path: (*path, 10**6), reverse=False):
        if not any(other[:-1] == path for other in paths if other):
            places[path] = (30 + leaves * STEP, 50 + len(path) * LEVEL)
            leaves += 1
    for path in sorted(paths, key=len, reverse=True):
        if path not in places:
            below = [places[other][0] for other in paths if other and other[:-1] == path]
            places[path] = ((min(below) + max(below)) / 2, 50 + len(path) * LEVEL)
    return places


def _bar(kind: str, stages: dict[str, dict[str, int]], y: int) -> str:
    total = sum(stage[kind] for stage in stages.values()) or 1
    parts, x = [f'<text x="12" y="{y}">{kind}</text>'], 100.0
    for name, stage in stages.items():
        width = 400 * stage[kind] / total
        label = f"{name} {stage[kind] / total:.0%}"
        parts.append(f'<rect x="{x:.1f}" y="{y - 14}" width="{width:.1f}" height="20" fill="{COLOURS[name]}"/>')
        if width > 60:
            parts.append(f'<text x="{x + 4:.1f}" y="{y}" font-size="11">{label}</text>')
        x += width
    return "\n".join(parts)
