"""What came before where the same tokens were allowed: a guess at what comes next, drafted beside what drafters say."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from .node_mask import NodeMask

MOST = 8192  # places that are remembered
FEW = 16  # tokens of one place that are told apart
OTHER = -1  # stands for all other ones
BEHIND = 2  # tokens ahead of a place that tell it from others


class Habits:
    """Counts the tokens that came at places of documents: where a grammar allowed certain tokens, behind two tokens,
    behind one, and behind any. Places that allow the same tokens are alike, as those behind the names of a JSON
    document: a model that writes its blanks in one way goes on to. Within a text, where tokens of all kinds may come,
    nothing is counted."""

    def __init__(self) -> None:
        self._counts: OrderedDict[int, Counter[int]] = OrderedDict()
        self._lock = threading.Lock()  # engines with one tokenizer learn from each other

    def learn(self, mask: NodeMask, behind: Sequence[int], token: int) -> None:
        """Count a token that came where a mask allowed it, behind others."""
        if mask.is_text:
            return
        with self._lock:
            for place in _places(mask, behind):
                counts = self._counts.setdefault(place, Counter())
                counts[token if token in counts or len(counts) < FEW else OTHER] += 1
                self._counts.move_to_end(place)
            while len(self._counts) > MOST:
                self._counts.popitem(last=False)

    def likely(self, mask: NodeMask, behind: Sequence[int]) -> int | None:
        """The token that came at such a place more often than all others together, behind as many of these tokens as
        are known there, None where none did."""
        if mask.is_text:
            return None
        with self._lock:
            for place in _places(mask, behind):
                counts = self._counts.get(place, Counter[int]())
                for token, count in counts.most_common(1):
                    if token != OTHER and 2 * count > counts.total():
                        return token
        return None


def _places(mask: NodeMask, behind: Sequence[int]) -> Iterator[int]:
    """Keys of a place, the narrowest one first."""
    for count in range(min(BEHIND, len(behind)), -1, -1):
        yield hash((mask.key, *behind[len(behind) - count :]))
