"""Run a model in a wider floating-point dtype without a second copy of its weights."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WIDTHS = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 4, torch.float64: 8}
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}  # their results share no memory with an argument
MOST = 2**24  # elements of a weight that are raised at once
GATHERS = {torch.ops.aten.embedding.default, torch.ops.aten.index.Tensor, torch.ops.aten.index_select.default}


class RaisedTo(TorchDispatchMode):
    """Within it, every operation takes and makes `dtype`, float32 or float64, where it would take or make a narrower
    floating-point one.

    The weights stay as they are: an operation sees a wider copy, which is gone when it returns, and a product one that
    the next product writes over; of a large weight it sees a part after the other. Tensors that an operation writes in
    place keep their dtype, and so do views: nothing is copied for them, nor for the rows of a table that are not read.
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype, self._narrow = dtype, {one for one, width in WIDTHS.items() if width < WIDTHS[dtype]}
        # Where a product's arguments are raised, by their places: to be given new memory takes longer than to fill it.
        self._room: dict[tuple[int, torch.device], Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view:
            return func(*args, **(kwargs or {}))
        if func in GATHERS:
            return self._raised(func(*args, **(kwargs or {})))
        if func in PRODUCTS and args[-1].dtype in self._narrow:
            return self._product(func, args, kwargs or {})
        names, written = _arguments(func)
        args = [arg if name in written else self._raised(arg) for name, arg in zip(names, args, strict=False)]
        kwargs = {name: arg if name in written else self._raised(arg) for name, arg in (kwargs or {}).items()}
        return func(*args, **kwargs)

    def _product(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """x [M, K] times a weight [K, N], as many columns of it at once as MOST allows; a bias may precede them."""
        *before, x, weight = [*(self._raised(arg) for arg in args[:-1]), args[-1]]
        columns = weight.shape[1]
        step = max(1, min(columns, MOST // max(1, weight.shape[0])))
        made = []
        for at in range(0, max(columns, 1), step):
            part = slice(at, at + step)
            bias = [each[..., part] if each.shape[-1:] == (columns,) else each for each in before]
            made.append(func(*bias, x, self._raised_here(weight[:, part], len(before)), **kwargs))
        return torch.cat(made, 1) if len(made) > 1 else made[0]

    def _raised_here(self, argument: Tensor, place: int) -> Tensor:
        """A matrix, raised where the last one of its place was, but for one that lies in another order."""
        if not (argument.is_contiguous() or argument.T.is_contiguous()):
            return self._raised(argument)
        key, count = (place, argument.device), argument.numel()
        if key not in self._room or self._room[key].numel() < count:
            self._room[key] = torch.empty(count, dtype=self.dtype, device=argument.device)
        return self._room[key].as_strided(argument.shape, argument.stride()).copy_(argument)

    def _raised(self, argument: Any) -> Any:
        """A tensor, a dtype, or a list of these."""
        if isinstance(argument, Tensor):
            return argument.to(self.dtype) if argument.dtype in self._narrow else argument
        if isinstance(argument, torch.dtype):
            return self.dtype if argument in self._narrow else argument
        return [self._raised(one) for one in argument] if isinstance(argument, list | tuple) else argument


@functools.cache
def _arguments(func: Any) -> tuple[list[str], set[str]]:
    """The names of an operation's arguments, and of those that it writes."""
    given = func._schema.arguments
    return [a.name for a in given], {a.name for a in given if a.alias_info is not None and a.alias_info.is_write}
