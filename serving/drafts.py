"""What a stream tells of its drafts where `stream_options.include_drafts` asks for it."""

from typing import Any

from ..runtime.request import Request
from ..runtime.text import EngineTokenizer, TextStream


class Drafts:
    """The extension `specstep` of one choice's chunks: {"tokens": the text of each of the step's tokens, "accepted":
    how many of them, from the front, were drafted}. The texts make up the choice's text, but for a stop string."""

    def __init__(self, tokenizer: EngineTokenizer):
        self._text = TextStream(tokenizer)
        self._drafted = 0

    def step(self, request: Request, tokens: list[int]) -> dict[str, Any]:
        """What the step that gave these tokens is to be told of."""
        ended = request.finish_reason is not None
        texts = [self._text.push([token], last=ended and at == len(tokens) - 1) for at, token in enumerate(tokens)]
        before, self._drafted = self._drafted, sum(depth * steps for depth, steps in request.accepted.items())
        return {"tokens": texts, "accepted": min(self._drafted - before, len(tokens))}
