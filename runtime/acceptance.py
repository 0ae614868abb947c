"""What finished requests say about the drafter that served them."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..report import AcceptedPath
from .asked.request import Request


@dataclass(frozen=True)
class Acceptance:
    """The tokens that some requests got, and the paths that their steps accepted (see `Request.paths`)."""

    requests: int
    tokens: int
    paths: Counter[AcceptedPath]

    @classmethod
    def of(cls, requests: Iterable[Request]) -> "Acceptance":
        """Add requests up."""
        finished, paths = list(requests), Counter[AcceptedPath]()
        for request in finished:
            paths.update(request.paths)
        return cls(len(finished), sum(len(request.tokens) for request in finished), paths)

    @property
    def steps(self) -> int:
        """Steps in all."""
        return self.paths.total()

    @property
    def tokens_per_step(self) -> float:
        """New tokens per step, those cut off by a stop token or a limit not counted."""
        return self.tokens / max(self.steps, 1)

    def by_depth(self) -> list[float]:
        """Share of the steps whose accepted path reaches depth 1, 2, ..."""
        return self._per_step(lambda path: range(1, len(path) + 1))

    def by_node(self) -> list[float]:
        """Share of the steps that accept node 1, 2, ... of the tree. Nodes of a dynamic tree are in order of score."""
        return self._per_step(lambda path: (accepted.node for accepted in path))

    def by_rank(self) -> list[float]:
        """Share of the accepted tokens that were their parent's first, second, ... choice."""
        shares = self._per_step(lambda path: (accepted.rank + 1 for accepted in path))
        return [share / sum(shares) for share in shares]

    def with_tree(self, nodes: int, depth: int, top_k: int) -> float:
        """Tokens per step had the tree had only its first `nodes` nodes, of these those down to `depth`, and of these
        the first `top_k` children of each. A dynamic tree of that shape puts others in the place of those left out."""
        kept = 0
        for path, steps in self.paths.items():
            inside = (node <= nodes and rank < top_k for node, rank in path[:depth])
            kept += steps * sum(1 for _ in itertools.takewhile(bool, inside))
        return 1 + kept / max(self.steps, 1)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        counts = {"requests": self.requests, "tokens": self.tokens, "steps": self.steps}
        shares = {name: getattr(self, name)() for name in ("by_depth", "by_node", "by_rank")}
        rounded = {name: [round(share, 5) for share in values] for name, values in shares.items()}
        return counts | {"tokens_per_step": round(self.tokens_per_step, 4)} | rounded

    def _per_step(self, places: Callable[[AcceptedPath], Iterable[int]]) -> list[float]:
        """How many of the steps have each of the places 1, 2, ... that `places` finds in their path."""
        counts = Counter[int]()
        for path, steps in self.paths.items():
            for place in places(path):
                counts[place] += steps
        return [counts[place] / self.steps for place in range(1, max(counts, default=0) + 1)]
