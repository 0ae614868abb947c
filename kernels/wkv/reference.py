"""RWKV's attention over a tree in plain torch: the specification.

Letters: B batch, T tokens, C channels.
"""

import torch
from torch import Tensor

LEAST = -1e38  # the exponent of sums that hold nothing


def wkv(
    key: Tensor, value: Tensor, decay: Tensor, first: Tensor, state: Tensor, parents: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Each token t takes its parent's sums a and b, of values and of their weights, for each channel, and computes

        out = (a + e^(first + key) value) / (b + e^(first + key))
        a = e^decay a + e^key value;  b = e^decay b + e^key

    (arXiv 2305.13048). So that no exponential overflows, a state holds e^-p a, e^-p b and p, the greatest exponent in
    them.

    Args, all float32 but for parents:
        key, value: [B, T, C].
        decay: [C], what is added to exponents from token to token, below 0. first: [C], what the exponent of a token
            has more for its own output.
        state: [B, 3, C] after the committed tokens, zeros ahead of the first; it is not written.
        parents: int64 [B, T], each less than its token's own number; -1 for those that follow the committed ones. None
            for a chain.

    Returns:
        out [B, T, C], and the states that the tokens leave, [B, T, 3, C].
    """
    states, outs = [state], []
    rows = torch.arange(state.shape[0], device=state.device)
    for t in range(key.shape[1]):
        before = states[-1] if parents is None else torch.stack(states, 1)[rows, parents[:, t] + 1]
        out, after = _token(key[:, t], value[:, t], decay, first, before)
        outs.append(out)
        states = [*states, after]
    return torch.stack(outs, 1), torch.stack(states[1:], 1)


def _token(k: Tensor, v: Tensor, decay: Tensor, first: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """One token: k, v [B, C], before [B, 3, C] -> out [B, C], and the state after it."""
    a, b, p = before.unbind(1)
    p = p.where(b != 0, LEAST)
    a_now, b_now, _ = _added(a, b, p, first + k, v)
    return a_now / b_now, torch.stack(_added(a, b, p + decay, k, v), 1)


def _added(a: Tensor, b: Tensor, p: Tensor, exponent: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums a and b, times e^p, and one value more with its weight's exponent."""
    greatest = torch.maximum(p, exponent)
    kept, new = (p - greatest).exp(), (exponent - greatest).exp()
    return kept * a + new * v, kept * b + new, greatest
