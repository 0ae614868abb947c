"""Static trees: their shape is fixed at build, their tokens come from the scorer.

Letters: B batch, F frontier nodes of a level, K candidates per frontier node.
"""

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .tree import Candidates, DraftTree, Expand, with_root

NodePath = tuple[int, ...]  # a node's rank among its siblings, and its ancestors', from the root down


class StaticTree(nn.Module):
    """A fixed tree given as node paths, as in Medusa: (0,) is the root's best child, (0, 2) that child's third.

    Paths may come in any order; they must be unique, and every proper prefix of a path must be a path.
    """

    def __init__(self, choices: Sequence[Sequence[int]]):
        """Raises ValueError naming the path that breaks a rule."""
        super().__init__()
        self.paths = check_choices(choices)
        self.depth, self.nodes = len(self.paths[-1]), len(self.paths)
        self.top_k = 1 + max(max(path) for path in self.paths)
        place = {(): 0} | {path: index for index, path in enumerate(self.paths, 1)}
        self.parents: Tensor
        self._register("parents", [place[path[:-1]] for path in self.paths])
        self.frontiers: list[int] = []
        level: list[NodePath] = [()]  # the nodes of a level, those of it that have children, and where these lie
        previous: list[NodePath] = []
        for depth in range(self.depth):
            expanded = [path for path in level if any(other[:-1] == path for other in self.paths)]
            following = [path for path in self.paths if len(path) == depth + 1]
            self._register(f"expanded_{depth}", [level.index(path) for path in expanded])
            self._register(f"slots_{depth}", [previous.index(path[:-1]) if path else 0 for path in expanded])
            picks = [expanded.index(path[:-1]) * self.top_k + path[-1] for path in following]
            self._register(f"picks_{depth}", picks)
            self.frontiers.append(len(expanded))
            level, previous = following, expanded

    def _register(self, name: str, values: list[int]) -> None:
        """Indices are buffers: a constant made while tracing would be lost by the compiler."""
        self.register_buffer(name, torch.tensor(values))

    def grow(self, root: Tensor, children: Candidates, expand: Expand) -> tuple[DraftTree, Tensor]:
        """root [B] int64 and its children [B, 1, K] -> the tree with the scores of its nodes, a node invalid where its
        parent is or where the scorer has no such candidate."""
        tokens, scores = root[:, None], torch.zeros_like(root[:, None], dtype=torch.float32)  # of the level, [B, nodes]
        all_tokens, all_scores = [], []
        for depth in range(self.depth):
            expanded, slots, picks = (self.get_buffer(f"{name}_{depth}") for name in ("expanded", "slots", "picks"))
            if depth > 0:
                children = expand(tokens[:, expanded], slots.expand(root.shape[0], -1))
            level_scores = scores[:, expanded, None] + children.log_probs  # [B, F, K]
            tokens, scores = children.tokens.flatten(1)[:, picks], level_scores.flatten(1)[:, picks]
            all_tokens.append(tokens)
            all_scores.append(scores)
        parents, scores = self.parents.expand(root.shape[0], -1), torch.cat(all_scores, 1)
        return with_root(root, torch.cat(all_tokens, 1), parents, scores > float("-inf")), scores


def check_choices(choices: Sequence[Sequence[int]]) -> list[NodePath]:
    """Paths by level, then in order. Raises ValueError."""
    paths = sorted((tuple(path) for path in choices), key=lambda path: (len(path), path))
    known = set(paths)
    if not paths:
        raise ValueError("tree choices: expected at least one path, got none")
    if len(known) != len(paths):
        raise ValueError("tree choices: expected unique paths, got duplicates")
    for path in paths:
        if not path or min(path) < 0:
            raise ValueError(f"tree choices: expected non-empty paths of ranks >= 0, got {list(path)}")
        if len(path) > 1 and path[:-1] not in known:
            raise ValueError(f"tree choices: expected the prefix {list(path[:-1])} of {list(path)} to be a path too")
    return paths


def likely_choices(nodes: int, depth: int, top_k: int) -> list[NodePath]:
    """The paths of a static tree with the highest expected acceptance, if each node's best child is accepted with
    probability 0.6 and each next rank with 0.35 times that of the one before. Raises ValueError when a tree of this
    depth and width cannot have so many nodes."""
    most = sum(top_k**level for level in range(1, depth + 1))
    if not 1 <= nodes <= most:
        raise ValueError(f"nodes: expected 1 to {most} for a static tree of depth {depth}, top_k {top_k}, got {nodes}")
    chosen: list[NodePath] = []
    open_paths: list[tuple[float, NodePath]] = [(-0.6, (0,))]
    while len(chosen) < nodes:
        value, path = heapq.heappop(open_paths)
        chosen.append(path)
        if len(path) < depth:
            heapq.heappush(open_paths, (value * 0.6, (*path, 0)))
        if path[-1] + 1 < top_k:
            heapq.heappush(open_paths, (value * 0.35, (*path[:-1], path[-1] + 1)))
    return chosen
