"""The likeliest tokens of rows of logits, in plain torch: the specification, and what torch runs without a kernel."""

import torch
from torch import Tensor

from ..bits import only_allowed
from ..noise import gumbel


def top_log_probs(
    logits: Tensor,
    nodes: Tensor,
    wanted: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    ids: Tensor | None,
    top: int,
    allowed: Tensor | None = None,
    masked: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The `top` tokens with the greatest log-probability, or with the greatest log-probability plus temperature times
    noise, the greatest first, the lowest index first among equals.

    Args:
        logits: [B, N, V], of any floating dtype.
        nodes: int64 [B, P], which of the N are looked at.
        wanted: int64 [B], 0 for rows that are left out.
        temperature: float32 [B], 0 for no noise. seeds: int64 [B], not negative. positions: int64 [B, P], where the
            tokens would stand: what the noise depends on.
        ids: int64 [V], what index v is called in the target's vocabulary; None for v itself.
        top: how many, at least 1.
        allowed: int32 [B, N, ceil(V / 32)]; bit j of word w: index 32 * w + j may be, all others have no probability.
            masked: int64 [B], 0 where a row's `allowed` says nothing. Both or neither.

    Returns:
        tokens: int64 [B, P, top], as `ids` call them. log_probs: float32 [B, P, top], without noise. total: float32
        [B, P], the logarithm of the sum of exp(logits). Rows that are left out, and places past V, are 0, -inf and 0.
    """
    vocabulary = logits.shape[2]
    x = logits.gather(1, nodes[:, :, None].expand(-1, -1, vocabulary)).float()
    if allowed is not None and masked is not None:
        x = only_allowed(x, allowed.gather(1, nodes[:, :, None].expand(-1, -1, allowed.shape[2])), masked)
    total = x.logsumexp(-1)
    names = torch.arange(vocabulary, device=x.device) if ids is None else ids
    noise = gumbel(seeds[:, None, None], positions[:, :, None], names)
    key = torch.where(temperature[:, None, None] > 0, x + temperature[:, None, None] * noise, x)
    best = key.sort(dim=-1, descending=True, stable=True).indices[:, :, :top]
    log_probs = x.gather(2, best) - total[:, :, None]
    missing = (0, max(top - vocabulary, 0))
    tokens = torch.nn.functional.pad(names[best], missing)
    log_probs = torch.nn.functional.pad(log_probs, missing, value=-torch.inf)
    asked = wanted[:, None] != 0
    return tokens.where(asked[:, :, None], 0), log_probs.where(asked[:, :, None], -torch.inf), total.where(asked, 0.0)
