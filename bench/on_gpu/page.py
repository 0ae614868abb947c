"""The figures as a table in Markdown, beside the goals."""

from typing import Any

from .ours import TOKENS, tokens_per_second
from .peers import COMPILED, PEERS

VERIFY_GOALS = {"llama-3-8b": 1.25, "llama-3.2-1b": 1.6}  # 16 nodes, over the floor, at most
DRAFT_GOAL, HOST_GOAL, GAIN_GOAL = 0.2, 50, 2.5  # share; microseconds; over compiled decoding with 3 tokens a step
HEAD = (
    "model", "tree", "rows", "cache", "step ms", "verify ms", "floor ms", "verify / floor", "draft", "host us",
    *(f"tokens/s at {tokens}" for tokens in TOKENS), "over compiled at 3",
)  # fmt: skip


def with_ratios(cell: dict[str, Any], weight_bytes: int, cache_bytes: int, bandwidth: float) -> dict[str, Any]:
    """A cell beside its floor: the target's weights and the caches of all rows, cache_bytes a token, over the bandwidth
    of a copy."""
    read = weight_bytes + cell["batch"] * cell["cache"] * cache_bytes
    floor_ms = read / bandwidth * 1e3
    ratios = {"step_over_floor": cell["step_ms"] / floor_ms, "verify_over_floor": cell["verify_ms"] / floor_ms}
    return cell | {"floor_bytes": read, "floor_ms": floor_ms} | ratios | {"tokens_s": tokens_per_second(cell)}


def over_compiled(cell: dict[str, Any], peers: list[dict[str, Any]], tokens: int) -> float | None:
    """How many times as fast a cell is, with so many tokens a step, as the fastest compiled decoding of as many rows;
    None where none was measured."""
    same = (cell["model"], cell["batch"], cell["cache"])
    times = [
        peer["token_ms"]
        for peer in peers
        if peer["peer"] in COMPILED and (peer["model"], peer["batch"], peer["cache"]) == same and "token_ms" in peer
    ]
    return cell["tokens_s"][tokens] / (cell["batch"] / min(times) * 1e3) if times else None


def page(result: dict[str, Any]) -> str:
    """Two tables: steps of ours, plain decoding of others; and the goals."""
    peers = result["peers"]
    parts = [_table(HEAD, [_row(cell, peers) for cell in result["cells"]])]
    sizes = sorted({(peer["model"], peer["batch"], peer["cache"]) for peer in peers})
    rows = [[*map(str, size), *(_peer(peers, size, name) for name in PEERS)] for size in sizes]
    parts.append(_table(("model", "rows", "cache", *(f"{name}, tokens/s" for name in PEERS)), rows))
    parts.append("\n".join(["Goals:", "", *(f"- {line}" for line in goals(result))]) + "\n")
    return "\n".join(parts)


def goals(result: dict[str, Any]) -> list[str]:
    """A line for each goal: what it is, and the worst that was measured where it applies; one row of any length."""
    single = [cell for cell in result["cells"] if cell["batch"] == 1]
    gains = [gain for cell in single if (gain := over_compiled(cell, result["peers"], 3)) is not None]
    found = {
        f"{model}: verify 16 nodes over floor, at most {most}": [
            cell["verify_over_floor"] for cell in single if (cell["model"], cell["nodes"]) == (model, 16)
        ]
        for model, most in VERIFY_GOALS.items()
    }
    found[f"share of the draft, below {DRAFT_GOAL}"] = [cell["draft_share"] for cell in single]
    found[f"host microseconds of a step, below {HOST_GOAL}"] = [cell["host_us"] for cell in single]
    lines = [f"{name}: {f'{max(values):.2f}' if values else 'not measured'}" for name, values in found.items()]
    least = f"{min(gains):.2f}" if gains else "not measured"
    return [*lines, f"3 tokens a step over the fastest compiled decoding, at least {GAIN_GOAL}: {least}"]


def _row(cell: dict[str, Any], peers: list[dict[str, Any]]) -> list[str]:
    gain = over_compiled(cell, peers, 3)
    return [
        cell["model"], cell["tree"], str(cell["batch"]), str(cell["cache"]), f"{cell['step_ms']:.2f}",
        f"{cell['verify_ms']:.2f}", f"{cell['floor_ms']:.2f}", f"{cell['verify_over_floor']:.2f}",
        f"{cell['draft_share']:.0%}", f"{cell['host_us']:.0f}",
        *(f"{cell['tokens_s'][tokens]:.0f}" for tokens in TOKENS), "" if gain is None else f"{gain:.2f}",
    ]  # fmt: skip


def _peer(peers: list[dict[str, Any]], size: tuple[str, int, int], name: str) -> str:
    """Tokens a second of all rows, or why there are none."""
    for peer in peers:
        if (peer["model"], peer["batch"], peer["cache"], peer["peer"]) == (*size, name):
            return f"{size[1] / peer['token_ms'] * 1e3:.0f}" if "token_ms" in peer else "failed"
    return ""


def _table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows]) + "\n"
