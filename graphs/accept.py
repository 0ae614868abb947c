"""Which drafted tokens the target agrees with, and what becomes of a row. No loop over nodes.

Letters: B batch, T = N + 1 nodes with the root, D greatest depth.
"""

import torch
from torch import Tensor

from .state import FULL, RUNNING, STOPPED, State
from .tree import DraftTree


def ancestor_mask(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """parents [B, T] -> (ancestors [B, T, T] bool, each node its own ancestor; depths [B, T] int64).

    Closure by squaring: after k products every ancestor within 2^k generations is reached.
    """
    nodes = torch.arange(parents.shape[1], device=parents.device)
    reach = ((parents[:, :, None] == nodes) | (nodes[:, None] == nodes)).float()
    for _ in range(max(0, depth - 1).bit_length()):
        reach = (reach @ reach).clamp(max=1.0)
    ancestors = reach > 0
    return ancestors, ancestors.sum(-1) - 1


def accept(tree: DraftTree, ancestors: Tensor, depths: Tensor, choice: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """choice [B, T], the token the target chooses after each node -> (path [B, D+1] int64, accepted [B] int64).

    A node is accepted when it and all its ancestors carry the token that the target chose at their parent; the deepest
    one wins. path[d] is the node at depth d; past the accepted depth it is d itself, so that a commit moves nothing.
    """
    wanted = choice.gather(1, tree.parents.clamp(min=0))
    wrong = ~(tree.valid & (tree.tokens == wanted))
    wrong[:, 0] = False
    agreed = ~(ancestors & wrong[:, None]).any(-1)
    count = tree.tokens.shape[1]
    nodes = torch.arange(count, device=choice.device)
    deepest = (agreed * (depths * count + count - nodes)).argmax(
        1, keepdim=True
    )  # keys are unique, the lowest index wins
    accepted = depths.gather(1, deepest)  # [B, 1]
    line = ancestors.gather(1, deepest[:, :, None].expand(-1, -1, count))[:, 0]  # [B, T] the winner's ancestors
    level = torch.arange(depth + 1, device=choice.device)
    on_path = line[:, None] & (depths[:, None] == level[:, None])  # [B, D+1, T]
    path = (on_path * nodes).sum(-1).where(level <= accepted, level)
    return path, accepted[:, 0]


def emit(state: State, path: Tensor, accepted: Tensor, choice: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The new tokens of each row: (tokens [B, D+1], count [B], finish [B]), cut at the first stop token and at the
    row's limit. The last one, chosen after the accepted path, was not drafted; it is the next root."""
    tokens = choice.gather(1, path)
    level = torch.arange(tokens.shape[1], device=tokens.device)
    stop = (tokens[:, :, None] == state["stop_ids"][:, None]).any(-1) & (level <= accepted[:, None])
    before_stop = (stop.cumsum(1) == 0).sum(1)  # tokens ahead of the first stop
    room = state["limits"] - state["lengths"] - 1
    count = torch.minimum(torch.minimum(accepted, before_stop) + 1, room)
    stopped, full = before_stop < count, count >= room
    finish = torch.full_like(count, RUNNING).masked_fill(full, FULL).masked_fill(stopped, STOPPED)
    running = state["finish"] == RUNNING
    return tokens, count.where(running, 0), finish.where(running, state["finish"])
