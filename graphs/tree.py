"""Draft trees: one type for every drafting method, and the two ways of growing one from a scorer.

Letters: B batch, N draft nodes, T = N + 1 tokens in a verify pass (node 0 is the root), F frontier nodes of a
level, K candidates per frontier node, C candidates in all.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Path = tuple[int, ...]  # ranks of a static tree's node among its siblings, from the root down


class DraftTree(NamedTuple):
    """A drafted tree. Node 0 is the root: the last committed token, whose KV is not in the cache yet.

    tokens [B, T] int64; parents [B, T] int64, -1 for the root, else an index below the node's own;
    valid [B, T] bool, False where the drafter had nothing to say. Siblings carry distinct tokens.
    """

    tokens: Tensor
    parents: Tensor
    valid: Tensor


class Candidates(NamedTuple):
    """Next-token candidates of each frontier node: tokens [B, F, K] int64 and log-probabilities [B, F, K] float32,
    -inf where there is no candidate."""

    tokens: Tensor
    log_probs: Tensor


class Expand(Protocol):
    """Scores the children of the frontier after the last: tokens [B, F] int64 and parents [B, F] int64, each node's
    index in the frontier before (the root is the only node of the first)."""

    def __call__(self, tokens: Tensor, parents: Tensor) -> Candidates: ...


def top(scores: Tensor, k: int) -> Tensor:
    """Indices [..., k] of the k largest scores, the lowest index first among equals, in no particular order beyond
    that.

    Scores are log-probabilities of at least -4096; ties are broken inside an integer key, because `topk` breaks them
    differently on every backend. A child never outranks its parent: scores fall along a path, indices rise.
    """
    count = scores.shape[-1]
    steps = (scores.clamp(min=-4096.0) * 2.0**18).round().to(torch.int64)
    index = torch.arange(count, device=scores.device)
    return (steps * count + (count - 1 - index)).topk(k, dim=-1).indices


class DynamicTree:
    """EAGLE-2's tree: keep the best `top_k` nodes of each level as the next frontier, give each `top_k` children, then
    keep the best `nodes` candidates of all levels. With `top_k` 1 it is a chain, with `depth` 0 the bare root.

    Source: EAGLE-2 (arXiv 2406.16858), section 4.
    """

    def __init__(self, depth: int, top_k: int, nodes: int):
        most = sum(self.level_sizes(depth, top_k))
        if not 0 <= depth <= nodes <= most:
            raise ValueError(
                f"nodes: expected between depth ({depth}) and all candidates of top_k {top_k} ({most}), got {nodes}"
            )
        self.depth, self.top_k, self.nodes = depth, top_k, nodes

    @staticmethod
    def level_sizes(depth: int, top_k: int) -> list[int]:
        """Candidates of each level: K children of the root, then K children for each of K nodes."""
        return [top_k if level == 0 else top_k * top_k for level in range(depth)]

    @property
    def frontiers(self) -> list[int]:
        """Nodes expanded at each level; the first is the root alone."""
        return [1 if level == 0 else self.top_k for level in range(self.depth)]

    def grow(self, root: Tensor, children: Candidates, expand: Expand) -> DraftTree:
        """root [B] int64 and its children [B, 1, K] -> the tree of the `nodes` most probable candidates."""
        if self.depth == 0:
            return bare_root(root)
        score = torch.zeros_like(root[:, None], dtype=torch.float32)  # [B, F] log-probability of each frontier node
        origin = torch.full_like(root[:, None], -1)  # [B, F] its candidate index; -1 for the root
        tokens, scores, parents, offset = [], [], [], 0
        for level, width in enumerate(self.frontiers):
            level_scores = (score[:, :, None] + children.log_probs).flatten(1)  # [B, F*K]
            tokens.append(children.tokens.flatten(1))
            scores.append(level_scores)
            parents.append(origin.repeat_interleave(self.top_k, dim=1))
            if level + 1 < self.depth:
                best = top(level_scores, self.top_k)  # [B, K] the next frontier
                score, origin = level_scores.gather(1, best), best + offset
                children = expand(tokens[-1].gather(1, best), best // self.top_k)
                offset += width * self.top_k
        return self._best(root, torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1))

    def _best(self, root: Tensor, tokens: Tensor, scores: Tensor, parents: Tensor) -> DraftTree:
        """The `nodes` best of all candidates [B, C] as a tree; it is connected because ties favour the parent."""
        chosen = top(scores, self.nodes).sort(dim=1).values  # [B, N] ascending, so parents come before children
        parent = parents.gather(1, chosen)
        found = chosen[:, None, :] == parent[:, :, None]  # [B, N, N]: which chosen node is the parent
        place = torch.arange(1, self.nodes + 1, device=root.device)
        place = (found * place).sum(-1)  # 0 where the parent is the root
        return with_root(root, tokens.gather(1, chosen), place, scores.gather(1, chosen) > float("-inf"))


class StaticTree:
    """A fixed tree given as node paths, as in Medusa: (0,) is the root's best child, (0, 2) that child's third.

    Paths may come in any order; they must be unique, and every proper prefix of a path must be a path.
    """

    def __init__(self, choices: Sequence[Sequence[int]]):
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
                raise ValueError(
                    f"tree choices: expected the prefix {list(path[:-1])} of {list(path)} to be a path too"
                )
        self.paths = paths
        self.depth, self.nodes = len(paths[-1]), len(paths)
        self.top_k = 1 + max(max(path) for path in paths)
        parents = {path[:-1] for path in paths}
        inner = [path for path in paths if path in parents]
        self._expanded: list[list[Path]] = [[()]]
        self._expanded += [[path for path in inner if len(path) == level] for level in range(1, self.depth)]

    @property
    def frontiers(self) -> list[int]:
        """Nodes expanded at each level; the first is the root alone."""
        return [len(level) for level in self._expanded]

    def grow(self, root: Tensor, children: Candidates, expand: Expand) -> DraftTree:
        """root [B] int64 and its children [B, 1, K] -> the tree, a node invalid where its parent is or where the
        scorer has no such candidate."""
        place: dict[Path, int] = {(): 0} | {path: index + 1 for index, path in enumerate(self.paths)}
        tokens: dict[Path, Tensor] = {(): root}
        valid: dict[Path, Tensor] = {(): torch.ones_like(root, dtype=torch.bool)}
        previous: list[Path] = [()]
        for level in self._expanded:
            if level != [()]:
                slot = torch.tensor([previous.index(path[:-1]) for path in level], device=root.device)
                children = expand(torch.stack([tokens[path] for path in level], 1), slot.expand(root.shape[0], -1))
            for path in (p for p in self.paths if p[:-1] in level):
                candidate = (slice(None), level.index(path[:-1]), path[-1])
                tokens[path] = children.tokens[candidate]
                valid[path] = valid[path[:-1]] & (children.log_probs[candidate] > float("-inf"))
            previous = level
        parents = torch.tensor([place[path[:-1]] for path in self.paths], device=root.device)
        columns = [torch.stack([column[path] for path in self.paths], 1) for column in (tokens, valid)]
        return with_root(root, columns[0], parents.expand(root.shape[0], -1), columns[1])


TreeShape = DynamicTree | StaticTree


def chain(length: int) -> DynamicTree:
    """The tree that never branches."""
    return DynamicTree(depth=length, top_k=1, nodes=length)


def likely_choices(nodes: int, depth: int, top_k: int) -> list[Path]:
    """The paths of a static tree that pay most if every node's best child is right with 0.6 and each next rank with
    0.35 of the one before. Raises ValueError when a tree of this depth and width cannot have so many nodes."""
    most = sum(top_k**level for level in range(1, depth + 1))
    if not 1 <= nodes <= most:
        raise ValueError(f"nodes: expected 1 to {most} for a static tree of depth {depth}, top_k {top_k}, got {nodes}")
    chosen: list[Path] = []
    open_paths: list[tuple[float, Path]] = [(-0.6, (0,))]
    while len(chosen) < nodes:
        value, path = heapq.heappop(open_paths)
        chosen.append(path)
        if len(path) < depth:
            heapq.heappush(open_paths, (value * 0.6, (*path, 0)))
        if path[-1] + 1 < top_k:
            heapq.heappush(open_paths, (value * 0.35, (*path[:-1], path[-1] + 1)))
    return chosen


def bare_root(root: Tensor) -> DraftTree:
    """root [B] -> the tree with no draft."""
    empty = root[:, None][:, :0]
    return with_root(root, empty, empty, empty.to(torch.bool))


def with_root(root: Tensor, tokens: Tensor, parents: Tensor, valid: Tensor) -> DraftTree:
    """Put the root [B] before N drafted nodes [B, N] whose parents count the root as node 0."""
    first = root[:, None]
    return DraftTree(
        torch.cat([first, tokens], 1),
        torch.cat([torch.full_like(first, -1), parents.where(valid, 0)], 1),
        torch.cat([torch.ones_like(first, dtype=torch.bool), valid], 1),
    )
