"""What a row emits after acceptance, and whether it ends. Letters: B batch, D greatest depth."""

import torch
from torch import Tensor

from ..report import FULL, RUNNING, STOPPED
from .state import State


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
