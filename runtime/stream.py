"""What a caller holds of a submitted request: its pieces as they come, and its outcome."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .request import Request
from .scheduler import Submission
from .text import EngineTokenizer, TextStream


@dataclass(frozen=True)
class Generation:
    """What became of one prompt. token_ids are the new ones only, a final stop token included; text leaves special
    tokens out. finish_reason: "stop", "length" or "cancelled". stats: see `request.Request.stats`."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stats: dict[str, Any]


class Piece(NamedTuple):
    """What a request's output grew by: token ids, and the text that is final now, which may be empty and may stem from
    tokens of earlier pieces. An engine without a tokenizer has no text."""

    token_ids: list[int]
    text: str


class Stream(Iterator[Piece]):
    """A submitted request: an iterator of pieces. Leaving it for good, by `cancel`, `with` or garbage collection, ends
    the request; nobody else's is touched."""

    def __init__(self, request: Request, submission: Submission, tokenizer: EngineTokenizer | None):
        self.request, self._submission, self._tokenizer = request, submission, tokenizer
        self._text = TextStream(tokenizer) if tokenizer else None

    def __next__(self) -> Piece:
        """Wait for the next step's tokens. Raises what the engine raised while it worked on the request."""
        _, tokens = next(self._submission)
        text = self._text.push(tokens, last=self.request.finish_reason is not None) if self._text else ""
        return Piece(tokens, text)

    def cancel(self) -> None:
        """End the request, from any thread. Its row is free when the step under way is done."""
        self._submission.cancel()

    def result(self) -> Generation:
        """Read to the end -> the outcome of the whole request."""
        for _ in self:
            pass
        return outcome(self.request, self._tokenizer)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


def outcome(request: Request, tokenizer: EngineTokenizer | None) -> Generation:
    """What became of a request, as far as it was read."""
    text = tokenizer.decode(request.tokens) if tokenizer else ""
    return Generation(request.prompt, request.tokens, text, request.finish_reason or "", request.stats)
