"""The number of a layer, which says whether somebody has looked at it."""

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

    @property
    def __class__(self) -> type:  # for isinstance
        return int


def number_of(layer: int) -> int:
    """The number itself, for a cache, which keeps the same of each layer: that is no look."""
    return layer.number if type(layer) is LayerNumber else layer  # type: ignore[unreachable]


def _reading(name: str) -> Callable[..., Any]:
    def read(number: LayerNumber, *given: Any) -> Any:
        number.read = True
        return getattr(int, name)(number.number, *(number_of(value) for value in given))

    return read


for _name in (
    *("__index__", "__int__", "__float__", "__complex__", "__bool__", "__hash__", "__repr__", "__str__", "__format__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__pos__", "__neg__", "__abs__", "__invert__"),
    *("__round__", "__floor__", "__ceil__", "__trunc__"),
    *(
        f"__{side}{operation}__"
        for operation in (
            *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift"),
            *("and", "or", "xor"),
        )
        for side in ("", "r")
    ),
):
    if hasattr(int, _name):
        setattr(LayerNumber, _name, _reading(_name))
