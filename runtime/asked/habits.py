"""What came before where the same tokens were allowed: a guess at what comes next, drafted beside what drafters say."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

MOST = 8192  # places that are remembered
FEW = 16  # tokens of one place that are told apart
OTHER = -1  # stands for all other ones
BEHIND = 2  # tokens ahead of a place that tell it from others

Mask = NDArray[np.uint32]


class Habits:
    """Counts the tokens that came at places of documents: where a grammar allowed certain tokens, behind two tokens,
    behind one, and behind any. Places that allow the same tokens are alike, as those behind the names of a JSON
    document: a model that writes its blanks in one way goes on to. Within a text, where tokens of all kinds may come,
    nothing is counted."""

    def __init__(self) -> None:
        self._counts: OrderedDict[int, Counter[int]] = OrderedDict()
        self._lock = threading.Lock()  # engines with one tokenizer learn from each other

    def learn(self, mask: Mask, behind: Sequence[int], token: int) -> None:
        """Count a token that came where a mask allowed it, behind others."""
        if _is_text(mask):
            return
        with self._lock:
            for place in _places(mask, behind):
                counts = self._counts.setdefault(place, Counter())
                counts[token if token in counts or len(counts) < FEW else OTHER] += 1
                self._counts.move_to_end(place)
            while len(self._counts) > MOST:
                self._counts.popitem(last=False)

    def likely(self, mask: Mask, behind: Sequence[int]) -> int | None:
        """The token that came at such a place more often than all others together, behind as many of these tokens as
        are known there, None where none did."""
        if _is_text(mask):
            return None
        with self._lock:
            for place in _places(mask, behind):
                counts = self._counts.get(place, Counter[int]())
                for token, count in counts.most_common(1):
                    if token != OTHER and 2 * count > counts.total():
                        return token
        return None


def _places(mask: Mask, behind: Sequence[int]) -> Iterator[int]:
    """Keys of a place, the narrowest one first."""
    allowed = hash(mask.tobytes())
    for count in range(min(BEHIND, len(behind)), -1, -1):
        yield hash((allowed, *behind[len(behind) - count :]))


def _is_text(mask: Mask) -> bool:
    """Whether a mask allows tokens all over the vocabulary, as within a text, which drafters know better."""
    return 2 * int(np.count_nonzero(mask)) > mask.size
