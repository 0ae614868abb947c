"""The ops that stand for layers in a graph, and for loops over them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.fx import GraphModule

NAMESPACE = "specstep"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # of these ops, as long as this process
_numbers = count()


@dataclass(frozen=True)
class LayerKind:
    """What layers have in common. op: its name in `torch.ops.specstep`. module: one layer, its weights, caches and all
    else that it reads as placeholders, some of which it writes in place; it returns a tuple. fake: what it returns, of
    the right sizes alone."""

    op: str
    module: GraphModule
    outputs: int
    fake: Callable[..., Any]

    @property
    def overload(self) -> Any:
        """The op that a graph calls."""
        return overload(self.op)


def overload(op: str) -> Any:
    """An op of ours by its name."""
    return getattr(getattr(torch.ops, NAMESPACE), op).default


def define_op(name: str, given: Sequence[str], outputs: int, fake: Callable[..., Any]) -> str:
    """Make an op of this process -> its name, `name` with a number. given: its arguments, as a schema has them."""
    own = f"{name}_{next(_numbers)}"
    returned = "Tensor" if outputs == 1 else f"({', '.join(['Tensor'] * outputs)})"
    _LIBRARY.define(f"{own}({', '.join(given)}) -> {returned}")
    torch.library.register_fake(f"{NAMESPACE}::{own}", fake, lib=_LIBRARY)
    return own
