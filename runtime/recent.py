"""What is made once for each size, for the sizes that came last: a service sees new ones for as long as it runs."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")


class Recent(Generic[Key, Made]):
    """What was made for the last `most` keys that were asked for."""

    def __init__(self, most: int):
        self._most = most
        self._made: OrderedDict[Key, Made] = OrderedDict()  # the least recently used first

    def get(self, key: Key, make: Callable[[], Made]) -> Made:
        """What was made for a key, or is made now."""
        if key in self._made:
            self._made.move_to_end(key)
            return self._made[key]
        made = self._made[key] = make()
        if len(self._made) > self._most:
            self._made.popitem(last=False)
        return made

    def clear(self) -> None:
        """Forget all of them."""
        self._made.clear()

    def __len__(self) -> int:
        return len(self._made)
