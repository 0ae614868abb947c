"""What a caller holds of a submitted request: its pieces as they come, and its outcome."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..report import TokenLogprobs
from .asked.request import Request
from .submission import Submission
from .text.channels import ChannelMessage, channel_messages, has_channels
from .text.tokenizer import EngineTokenizer, TextStream


@dataclass(frozen=True)
class Generation:
    """What became of one prompt."""

    prompt_token_ids: list[int]  # of the whole prompt
    token_ids: list[int]  # the new ones alone, a final stop token included
    # without special tokens but for marks of channels, and without a stop string, whose last token ends `token_ids`
    text: str
    finish_reason: str  # see `Request`
    stats: dict[str, Any]  # see `Request.stats`
    seed: int | None = None  # None: greedy
    logprobs: list[TokenLogprobs] | None = None  # one of each token; None: not asked for
    channels: tuple[ChannelMessage, ...] = ()  # messages of the text, of a model that answers in channels, as gpt-oss
    more: "tuple[Generation, ...]" = ()  # the further choices, where more than one was asked for

    @property
    def choices(self) -> "list[Generation]":
        """All choices, this one first."""
        return [self, *self.more]


class Piece(NamedTuple):
    """What a request's output grew by: token ids, and the text that is final now, which may be empty and may stem from
    tokens of earlier pieces; the tokens' logprobs, where they were asked for; how many of the tokens, from the front,
    were accepted drafts. An engine without a tokenizer has no text."""

    token_ids: list[int]
    text: str
    logprobs: Sequence[TokenLogprobs] = ()
    accepted: int = 0


class Pieces:
    """Makes the pieces of one request of its new tokens, each as they were read."""

    def __init__(self, request: Request, tokenizer: EngineTokenizer | None):
        self._request = request
        self._text = TextStream(tokenizer) if tokenizer else None

    def take(self, tokens: list[int]) -> Piece:
        """The piece of the tokens that the request was last updated with."""
        logprobs = self._request.logprobs[len(self._request.tokens) - len(tokens) :]
        return Piece(tokens, self._new_text(tokens), logprobs, min(len(self._request.path), len(tokens)))

    def _new_text(self, tokens: list[int]) -> str:
        if self._request.stop_text is not None:
            return self._request.texts[-1]
        return self._text.push(tokens, last=self._request.finish_reason is not None) if self._text else ""


class Stream(Iterator[Piece]):
    """A submitted request: an iterator of pieces. Leaving it for good, by `cancel`, `with` or garbage collection, ends
    the request; nobody else's is touched."""

    def __init__(self, request: Request, submission: Submission, tokenizer: EngineTokenizer | None):
        self.request, self._submission, self._tokenizer = request, submission, tokenizer
        self._pieces = Pieces(request, tokenizer)

    def __next__(self) -> Piece:
        """Wait for the next step's tokens. Raises what the engine raised while it worked on the request."""
        _, tokens = next(self._submission)
        return self._pieces.take(tokens)

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
    if request.stop_text is not None:
        text = "".join(request.texts) + request.open
    else:
        text = tokenizer.text_of(request.tokens) if tokenizer else ""
    logprobs = request.logprobs if "logprobs" in request.controls else None
    reason = request.finish_reason or ""
    in_channels = tokenizer is not None and has_channels(tokenizer.chat_template)
    channels = tuple(channel_messages(text, True)) if in_channels else ()
    return Generation(request.prompt, request.tokens, text, reason, request.stats, request.seed, logprobs, channels)
