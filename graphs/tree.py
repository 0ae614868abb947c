"""Draft trees: one type for every drafting method, and how a dynamic one grows from a scorer.

Letters: B batch, N draft nodes, T = N + 1 tokens in a verify pass (node 0 is the root), F frontier nodes of a
level, K candidates per frontier node, C candidates in all.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .state import State


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

    def where(self, rows: Tensor) -> "Candidates":
        """None in other rows than these, bool [B], as where a drafter has not caught up."""
        return Candidates(self.tokens, self.log_probs.where(rows[:, None, None], float("-inf")))


class Expand(Protocol):
    """Scores the children of the next frontier: tokens [B, F] int64 and parents [B, F] int64, each node's index in the
    frontier before (the root is the only node of the first)."""

    def __call__(self, tokens: Tensor, parents: Tensor) -> Candidates: ...


class TreeShape(Protocol):
    """How a tree grows: at most `nodes` nodes and `depth` levels, `top_k` candidates per node; `frontiers` says how
    many nodes each level expands, the first being the root alone."""

    nodes: int
    depth: int
    top_k: int

    @property
    def frontiers(self) -> list[int]: ...

    def grow(self, root: Tensor, children: Candidates, expand: Expand) -> tuple[DraftTree, Tensor]:
        """root [B] int64, its children [B, 1, K], and how to go on -> the tree, and the score of each of its nodes but
        the root [B, N] float32: log-probabilities along its path, -inf where there is no node."""
        ...


def top(scores: Tensor, k: int) -> Tensor:
    """Indices [..., k] of the k largest scores, the largest first, the lowest index first among equals.

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

    def grow(self, root: Tensor, children: Candidates, expand: Expand) -> tuple[DraftTree, Tensor]:
        """root [B] int64 and its children [B, 1, K] -> the tree of the `nodes` most probable candidates, with their
        scores."""
        if self.depth == 0:
            return bare_root(root), torch.zeros_like(root[:, None][:, :0], dtype=torch.float32)
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

    def _best(self, root: Tensor, tokens: Tensor, scores: Tensor, parents: Tensor) -> tuple[DraftTree, Tensor]:
        """The `nodes` best of all candidates [B, C] as a tree, the best first; it is connected, and parents come before
        children, because ties favour the parent. So the first n nodes are the tree of n nodes."""
        chosen = top(scores, self.nodes)  # [B, N]
        parent = parents.gather(1, chosen)
        found = chosen[:, None, :] == parent[:, :, None]  # [B, N, N]: which chosen node is the parent
        place = torch.arange(1, self.nodes + 1, device=root.device)
        place = (found * place).sum(-1)  # 0 where the parent is the root
        scores = scores.gather(1, chosen)
        return with_root(root, tokens.gather(1, chosen), place, scores > float("-inf")), scores


def chain(length: int) -> DynamicTree:
    """The tree that never branches."""
    return DynamicTree(depth=length, top_k=1, nodes=length)


def drafted_tree(state: State) -> DraftTree:
    """The tree that lies in the state, below the row's root. A row that was given none yet has the bare root."""
    root = state["history"].gather(1, state["lengths"][:, None])
    parents = state["tree_parents"]
    valid = (parents >= 0).index_fill(1, torch.zeros(1, dtype=torch.int64, device=root.device), True)
    return DraftTree(torch.cat([root, state["tree_tokens"][:, 1:]], 1), parents, valid)


def first_nodes(tree: DraftTree, nodes: Tensor) -> DraftTree:
    """The tree of some nodes [T] int64: the first ones, the root among them. A parent comes before its children, in a
    dynamic tree also the better node before the others."""
    return DraftTree(*(part.index_select(1, nodes) for part in tree))


def tree_state(tree: DraftTree) -> State:
    """A tree as the state holds it: parent -1 for the root, and where there is no node."""
    return {"tree_tokens": tree.tokens, "tree_parents": tree.parents.where(tree.valid, -1)}


def missed_node(drafted: DraftTree, parent: Tensor, token: Tensor) -> Tensor:
    """[B, 1] the node of a drafted tree below the node `parent` [B, 1] that carries `token` [B, 1], 0 for none."""
    node = torch.arange(drafted.parents.shape[1], device=token.device)
    found = drafted.valid & (drafted.parents == parent) & (drafted.tokens == token) & (node > 0)
    return (found * node).amax(1, keepdim=True)


def what_follows(state: State, tree: DraftTree, choice: Tensor) -> Tensor:
    """[B, T, 3] int64: the token ahead of each node, -1 where there is none, its own, and what the target says next
    (choice [B, T]), -1 where there is no node. state: as ahead of the step.

    A history ..., 5, 7, whose 7 is the root; node 1 is 9; the target says 9, and 4 after it: [[5, 7, 9], [7, 9, 4]].
    """
    before = state["lengths"][:, None] - 1
    before = state["history"].gather(1, before.clamp(min=0)).where(before >= 0, -1)
    parents = tree.tokens.gather(1, tree.parents.clamp(min=0)).where(tree.parents >= 0, before)
    return torch.stack([parents, tree.tokens, choice.where(tree.valid, -1)], 2)


def bare_root(root: Tensor) -> DraftTree:
    """root [B] -> the tree with no draft."""
    empty = root[:, None][:, :0]
    return with_root(root, empty, empty, empty.to(torch.bool))


def sibling_ranks(tree: DraftTree) -> Tensor:
    """[B, T] how many siblings come before each node, 0 for the root."""
    node = torch.arange(tree.parents.shape[1], device=tree.parents.device)
    sibling = (tree.parents[:, None, :] == tree.parents[:, :, None]) & tree.valid[:, None, :]
    return (sibling & (node < node[:, None])).sum(-1)


def with_root(root: Tensor, tokens: Tensor, parents: Tensor, valid: Tensor) -> DraftTree:
    """Put the root [B] before N drafted nodes [B, N] whose parents count the root as node 0."""
    first = root[:, None]
    return DraftTree(
        torch.cat([first, tokens], 1),
        torch.cat([torch.full_like(first, -1), parents.where(valid, 0)], 1),
        torch.cat([torch.ones_like(first, dtype=torch.bool), valid], 1),
    )
