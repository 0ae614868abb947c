"""Committing the accepted path of linear attention in plain torch: the specification. Letters: see
`linear_attention.reference`; P of a path: its places."""

from torch import Tensor

from ..linear_attention.reference import decayed, spread, written_to


def fold(
    state: Tensor, key: Tensor, decay: Tensor, rates: Tensor | None, update: Tensor, path: Tensor, count: Tensor
) -> None:
    """Write the first tokens of each row's path to its state, in place and in their order: the state is then the one
    that the last of them had in `linear_attention`, to the bit.

    Args:
        state: float32 [B, H, N, P], written.
        key, decay, rates: as `linear_attention` had them, [B, T, G, N], [B, T, H, ..] and [H, N, P]; update [B, T, H,
            P]: what it returned as written.
        path: int64 [B, places]: tokens, each the parent of the next one. count: int64 [B], how many of them.
    """
    state.copy_(folded(state, key, decay, rates, update, path, count))


def folded(
    state: Tensor, key: Tensor, decay: Tensor, rates: Tensor | None, update: Tensor, path: Tensor, count: Tensor
) -> Tensor:
    """The state after `fold`, as a new tensor."""
    key = spread(key, update)
    for place in range(path.shape[1]):
        index = path[:, place, None, None, None].clamp(0, update.shape[1] - 1)
        k, d, u = (x.gather(1, index.expand(-1, -1, *x.shape[2:]))[:, 0] for x in (key, decay, update))
        after = written_to(decayed(state, d, rates), k, u)
        state = after.where((place < count)[:, None, None, None], state)
    return state
