"""Linear attention over a tree in plain torch: the specification.

Letters: B batch, T tokens, G heads of queries and keys, H heads of values, N and P the sizes of a key and of a value.
Value head h has query and key head h // (H / G). For Mamba the values are its channels, P to a head, N the size of a
channel's state.
"""

import torch
from torch import Tensor


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rates: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    parents: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Each token t takes its parent's state S [N, P], for each row and value head, and computes

        S = decay S;  u = value, or beta (value - S^T key);  S = S + key u^T;  out = S^T query

    With beta it is the gated delta rule (arXiv 2412.06464), without it the recurrence of Mamba-2 (arXiv 2405.21060;
    query C, key B, value dt x, decay exp(dt A)); with rates that of Mamba (arXiv 2312.00752; rates A, decay dt).

    Args, all float32 but for parents:
        query, key: [B, T, G, N].
        value: [B, T, H, P].
        decay: [B, T, H, N], or [B, T, H, 1] for one number a head: factors, not their logarithms. With rates [B, T, H,
            P], what these are multiplied with.
        rates: [H, N, P], logarithms of the factors of each place of the state.
        beta: [B, T, H].
        state: [B, H, N, P] after the committed tokens; it is not written.
        parents: int64 [B, T], each less than its token's own number; -1 for those that follow the committed ones. None
            for a chain.

    Returns:
        out [B, T, H, P], and what was written, u [B, T, H, P], for `fold`.
    """
    query, key = spread(query, value), spread(key, value)
    states, outs, written = [state], [], []
    rows = torch.arange(state.shape[0], device=state.device)
    for t in range(value.shape[1]):
        before = states[-1] if parents is None else torch.stack(states, 1)[rows, parents[:, t] + 1]
        before = decayed(before, decay[:, t], rates)
        u = value[:, t]
        if beta is not None:
            u = (u - (before * key[:, t, :, :, None]).sum(2)) * beta[:, t, :, None]
        after = written_to(before, key[:, t], u)
        outs.append((after * query[:, t, :, :, None]).sum(2))
        written.append(u)
        states = [after] if parents is None else [*states, after]
    return torch.stack(outs, 1), torch.stack(written, 1)


def decayed(state: Tensor, decay: Tensor, rates: Tensor | None) -> Tensor:
    """state [B, H, N, P] times decay [B, H, N or 1], or, with rates [H, N, P], times what these and [B, H, P] say."""
    return state * (decay[..., None] if rates is None else (rates * decay[:, :, None]).exp())


def written_to(state: Tensor, key: Tensor, u: Tensor) -> Tensor:
    """state [B, H, N, P], decayed, key [B, H, N], u [B, H, P] -> the state after a token."""
    return state + key[..., None] * u[:, :, None]


def spread(key: Tensor, value: Tensor) -> Tensor:
    """Keys or queries [B, T, G, N] -> [B, T, H, N], those of each of the value's heads."""
    return key.repeat_interleave(value.shape[2] // key.shape[2], 2)
