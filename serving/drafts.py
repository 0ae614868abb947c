"""What a stream tells of its drafts where `stream_options.include_drafts` asks for it."""

from typing import Any

from ..runtime.stream import Piece
from ..runtime.text.tokenizer import EngineTokenizer, TextStream
from .bridge import Grown


class Drafts:
    """The extension `specstep` of one choice's chunks: {"steps": [{"tokens": the text of each of a step's tokens,
    "accepted": how many of them, from the front, were drafted}]}. The texts make up the choice's text, but for a stop
    string."""

    def __init__(self, tokenizer: EngineTokenizer):
        self._text = TextStream(tokenizer)

    def told(self, grown: Grown) -> dict[str, Any]:
        """What the steps that a chunk is of are to be told of."""
        ended = grown.request.finish_reason is not None
        return {"steps": [self._step(piece, ended and piece is grown.pieces[-1]) for piece in grown.pieces]}

    def _step(self, piece: Piece, last: bool) -> dict[str, Any]:
        places = enumerate(piece.token_ids, start=1)
        texts = [self._text.push([token], last=last and place == len(piece.token_ids)) for place, token in places]
        return {"tokens": texts, "accepted": piece.accepted}
