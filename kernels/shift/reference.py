"""Committing the accepted path of a short convolution in plain torch: the specification."""

import torch
from torch import Tensor


def shift(window: Tensor, inputs: Tensor, path: Tensor, count: Tensor) -> None:
    """Move each row's window behind the first tokens of its path, in place.

    Args:
        window: [B, W, C], the last W inputs of C channels, the oldest first; written.
        inputs: [B, T, C], those of a pass.
        path: int64 [B, places], tokens of the pass. count: int64 [B], how many of them.
    """
    window.copy_(shifted(window, inputs, path, count))


def shifted(window: Tensor, inputs: Tensor, path: Tensor, count: Tensor) -> Tensor:
    """The window after `shift`, as a new tensor."""
    size = window.shape[1]
    place = count[:, None] + torch.arange(size, device=window.device)  # in the window and the path behind it
    token = path.gather(1, (place - size).clamp(0, path.shape[1] - 1)).clamp(0, inputs.shape[1] - 1) + size
    index = place.where(place < size, token)
    return torch.cat([window, inputs], 1).gather(1, index[:, :, None].expand(-1, -1, window.shape[2]))
