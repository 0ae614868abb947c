"""States of recurrent layers, kept with the blocks of a prefix cache at whose end they were."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from numpy.typing import NDArray

from ..errors import InputError
from .manifest_fields import DTYPE_BYTES
from .session import Session

Keyed = TypeVar("Keyed", bound=tuple[Any, "TokenBlock"])


class TokenBlock(NamedTuple):
    """One block of tokens. number: given once; place: where it lies in the store, in blocks."""

    number: int
    place: int


class RowStates:
    """States within a budget, on the host; the least recently used make room for others."""

    def __init__(self, session: Session, budget: int, parts: int):
        """budget: most bytes of a prefix cache, of which the states are one of so many parts. of_drafter: whether some
        of the states are the drafter's. Raises InputError where that is less than the state of a row takes."""
        self.session = session
        self.of_drafter = not set(session.spec.recurrent).isdisjoint(session.spec.drafter_tensors)
        tensors = [tensor for tensor in session.spec.state if tensor.name in session.spec.recurrent]
        self.row_bytes = sum(math.prod(t.shape[1:]) * DTYPE_BYTES[t.dtype] for t in tensors)
        self.most = budget // parts // self.row_bytes
        if self.most < 1:
            raise InputError(
                f"prefix_cache_bytes: expected 0, or at least {parts * self.row_bytes}, for a row of this model keeps "
                f"states of {self.row_bytes} bytes{', which take a half of it' if parts > 1 else ''}; got {budget}"
            )
        self._kept: OrderedDict[int, dict[str, NDArray[Any]]] = OrderedDict()  # by the numbers of blocks

    @property
    def used_bytes(self) -> int:
        """What those take that are kept now."""
        return len(self._kept) * self.row_bytes

    def last(self, blocks: Sequence[Keyed]) -> list[Keyed]:
        """The first of these blocks, up to the last one with a state."""
        with_state = [index for index, (_, block) in enumerate(blocks, 1) if self.has(block)]
        return list(blocks[: max(with_state, default=0)])

    def has(self, block: TokenBlock) -> bool:
        """Whether a state is kept with a block."""
        return block.number in self._kept

    def keep(self, row: int, block: TokenBlock) -> None:
        """Keep a row's state, which is that at the end of the block."""
        if block.number not in self._kept:
            if len(self._kept) == self.most:
                self._kept.popitem(last=False)
            self._kept[block.number] = {name: self.session.numpy(name, row) for name in self.session.spec.recurrent}
        self._kept.move_to_end(block.number)

    def recall(self, row: int, block: TokenBlock) -> None:
        """Give a row the state that was kept with a block."""
        self._kept.move_to_end(block.number)
        for name, values in self._kept[block.number].items():
            self.session.set(name, row, values)

    def forget(self, block: TokenBlock) -> None:
        """Drop what was kept with a block, if anything was."""
        self._kept.pop(block.number, None)
