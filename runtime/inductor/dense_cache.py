"""A cache that is one tensor on any device, and the store of its prefixes."""

import torch
from torch import Tensor

from ..engine_file import TensorSpec


class DenseCache:
    """A cache [B, H, S, D], zeros. tensor: it; store: [H, slots, D], after `make_store`."""

    def __init__(self, spec: TensorSpec, device: torch.device):
        self.tensor: Tensor = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)

    def make_store(self, slots: int, lookahead: int) -> None:
        """Allocate the store. lookahead: see `PagedCache`."""
        _, heads, _, width = self.tensor.shape
        self.store: Tensor = self.tensor.new_zeros(heads, slots, width)

    def keep(self, row: int, start: int, place: int, count: int) -> None:
        """Copy a row's slots, `count` from `start` on, to the store's from `place` on."""
        self.store[:, place : place + count] = self.tensor[row, :, start : start + count]

    def recall(self, row: int, start: int, place: int, count: int) -> None:
        """Copy the store's slots to a row's."""
        self.tensor[row, :, start : start + count] = self.store[:, place : place + count]

    def clear(self, row: int, slots: int) -> None:
        """Fill the first slots of a row with zeros."""
        self.tensor[row, :, :slots] = 0
