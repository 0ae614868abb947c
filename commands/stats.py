"""Speed and acceptance of finished requests, for people."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runtime.asked.request import Request

COLUMNS, BARS = 60, " ▁▂▃▄▅▆▇█"


def speed(requests: Sequence["Request"], seconds: float) -> str:
    """One line about a run that took so many seconds, prefill and queue included."""
    tokens, steps = sum(len(r.tokens) for r in requests), sum(r.steps for r in requests)
    first = statistics.median(r.first_token_s for r in requests)
    return (
        f"{tokens} tokens in {seconds:.2f} s: {tokens / max(seconds, 1e-9):.1f} tokens/s, "
        f"{tokens / max(steps, 1):.2f} tokens per step, time to first token {first * 1000:.0f} ms"
    )


def verified(requests: Sequence["Request"]) -> str:
    """Two lines about how many drafted tokens the steps verified: the shares of steps, and the mean over the answers'
    course."""
    steps = Counter(nodes for request in requests for nodes in request.nodes)
    shares = ", ".join(f"{nodes}: {count / steps.total():.0%}" for nodes, count in sorted(steps.items()))
    most = max([1, *steps])
    bars = "".join(BARS[round(mean / most * (len(BARS) - 1))] for mean in course(requests))
    return f"drafted tokens verified per step, and share of steps: {shares}\n  from first to last step |{bars}|"


def course(requests: Sequence["Request"]) -> list[float]:
    """Drafted tokens that a step verified over the answers' course: the mean in each of at most COLUMNS parts."""
    answers = [request.nodes for request in requests if request.nodes]
    width = min(COLUMNS, max(map(len, answers), default=0))
    sums, counts = [0] * width, [0] * width
    for nodes in answers:
        for step, count in enumerate(nodes):
            place = step * width // len(nodes)
            sums[place] += count
            counts[place] += 1
    return [total / max(count, 1) for total, count in zip(sums, counts, strict=True)]
