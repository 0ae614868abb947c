"""Speed and acceptance of finished requests, for people."""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runtime.request import Request


def speed(requests: Sequence["Request"], seconds: float) -> str:
    """One line about a run that took so many seconds, prefill and queue included."""
    tokens, steps = sum(len(r.tokens) for r in requests), sum(r.steps for r in requests)
    first = statistics.median(r.first_token_s for r in requests)
    return (
        f"{tokens} tokens in {seconds:.2f} s: {tokens / max(seconds, 1e-9):.1f} tokens/s, "
        f"{tokens / max(steps, 1):.2f} tokens per step, time to first token {first * 1000:.0f} ms"
    )
