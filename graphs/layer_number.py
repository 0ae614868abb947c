"""The number of a layer, which says whether somebody has looked at it."""

import builtins
import math
import operator
from collections.abc import Callable
from typing import Any


class LayerNumber:
    """An int for all who use it, which notes that. Not an int to Python itself, whose lists would read one unseen."""

    __slots__ = ("number", "read")

    def __init__(self, number: int):
        self.number, self.read = number, False

    def __getattr__(self, name: str) -> Any:
        self.read = True
        return getattr(self.number, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for isinstance
        return int


def number_of(layer: int) -> int:
    """The number itself, for a cache, which keeps the same of each layer: that is no look."""
    return layer.number if type(layer) is LayerNumber else layer


def _reading(function: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: LayerNumber, *given: Any) -> Any:
        self.read = True
        return function(self.number, *(number_of(value) for value in given))

    return read


def _reading_last(function: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: LayerNumber, other: Any) -> Any:
        self.read = True
        return function(number_of(other), self.number)

    return read


for _name in ("int", "float", "complex", "bool", "hash", "repr", "str", "format", "round", "divmod"):
    setattr(LayerNumber, f"__{_name}__", _reading(getattr(builtins, _name)))
for _name in ("floor", "ceil", "trunc"):
    setattr(LayerNumber, f"__{_name}__", _reading(getattr(math, _name)))
for _name in ("index", "eq", "ne", "lt", "le", "gt", "ge", "pos", "neg", "abs", "invert"):
    setattr(LayerNumber, f"__{_name}__", _reading(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor"):
    _function = getattr(operator, f"__{_name}__")
    setattr(LayerNumber, f"__{_name}__", _reading(_function))
    setattr(LayerNumber, f"__r{_name}__", _reading_last(_function))
LayerNumber.__rdivmod__ = _reading_last(divmod)  # type: ignore[attr-defined]
