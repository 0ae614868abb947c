"""Stop strings: an output's text as it comes, up to the first of them."""

from collections.abc import Sequence

from .tokenizer import EngineTokenizer, TextStream


class StopText:
    """The text of a request that has stop strings. Holds back what may become one.

    The string that ends first counts, and of those that end together the longest: where the text ends depends on the
    text alone, not on the tokens that it comes in, or on how many come at once.
    """

    def __init__(self, tokenizer: EngineTokenizer, strings: Sequence[str], least: int = 0):
        """least: tokens at the front in which no stop string may end."""
        self._stream = TextStream(tokenizer)
        self._strings, self._least = strings, least
        self._longest = max(map(len, strings), default=0)
        self._final: list[str] = []  # text in which no stop string begins
        self._open = ""  # what follows it: the start of a stop string, perhaps
        self._tokens = self._taken = 0  # tokens that came, and parts of `_final` that were handed out
        self.found = False

    def over(self, tokenizer: EngineTokenizer) -> "StopText":
        """A new one that looks for the same in another text of the tokens."""
        return StopText(tokenizer, self._strings, self._least)

    @property
    def open(self) -> str:
        """What may become a stop string, and is text if it does not."""
        return self._open

    def push(self, tokens: Sequence[int], last: bool = False) -> int:
        """Add tokens, with `last` the last ones -> how many of them are output: up to the one that completes a stop
        string, after which nothing is to be added."""
        for count, token in enumerate(tokens, 1):
            self._tokens += 1
            self._add(self._stream.push([token]))
            if self.found:
                return count
        if last:
            self._add(self._stream.push([], last=True))
            self._final.append(self._open)
            self._open = ""
        return len(tokens)

    def take(self) -> str:
        """What is final and was not taken yet."""
        new = "".join(self._final[self._taken :])
        self._taken = len(self._final)
        return new

    def _add(self, text: str) -> None:
        """Add text, which is all of one token."""
        known, self._open = len(self._open), self._open + text
        start = self._first_stop(known) if text and self._tokens > self._least else None
        self.found = start is not None
        keep = len(self._open) - self._held() if start is None else start
        self._final.append(self._open[:keep])
        self._open = "" if self.found else self._open[keep:]

    def _first_stop(self, known: int) -> int | None:
        """Where in the open text the stop string begins that ends first, past the `known` characters."""
        found = []
        for string in self._strings:
            start = self._open.find(string, max(0, known + 1 - len(string)))
            if start >= 0:
                found.append((start + len(string), start))
        return min(found)[1] if found else None

    def _held(self) -> int:
        """The length of the longest end of the open text that a stop string begins with, and is longer than."""
        for length in range(min(self._longest - 1, len(self._open)), 0, -1):
            end = self._open[-length:]
            if any(len(string) > length and string.startswith(end) for string in self._strings):
                return length
        return 0
