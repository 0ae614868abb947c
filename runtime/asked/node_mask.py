"""Which tokens may follow a node, and what is asked of that again and again."""

import numpy as np
from numpy.typing import NDArray


class NodeMask:
    """A token may follow where its bit is set. All bits are looked at once, when it is made.

    bits: uint32 [ceil(vocabulary / 32)]. key: the same for the same bits. only: the one token that may follow, None for
    none or more. is_text: whether tokens all over the vocabulary may, as within a text.
    """

    __slots__ = ("_bytes", "bits", "is_text", "key", "only")

    def __init__(self, bits: NDArray[np.uint32]):
        self.bits, self._bytes = bits, bits.astype("<u4", copy=False).tobytes()
        self.key = hash(self._bytes)
        words = bits.nonzero()[0]
        self.is_text = 2 * len(words) > len(bits)
        self.only: int | None = None
        if len(words) == 1:
            place, word = int(words[0]), int(bits[words[0]])
            self.only = None if word & (word - 1) else place * 32 + word.bit_length() - 1

    def allows(self, token: int) -> bool:
        """Whether a token may follow."""
        return bool(self._bytes[token >> 3] >> (token & 7) & 1)
