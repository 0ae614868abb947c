"""Single tokens as bytes: a token may be a part of a character."""

import json
import re
from functools import cached_property, lru_cache

from .tokenizer import EngineTokenizer

BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte in vocabularies of sentencepiece
WORD_START = "▁"


class TokenText:
    """The bytes of each token of a tokenizer, special tokens under their names."""

    def __init__(self, tokenizer: EngineTokenizer):
        self.tokenizer = tokenizer
        self.of = lru_cache(2**16)(self._of)  # likely tokens come again and again

    @cached_property
    def longest(self) -> int:
        """The most characters that one token can stand for."""
        return max(map(len, self.tokenizer.tokenizer.get_vocab()), default=1)

    def _of(self, token: int) -> bytes:
        written = self.tokenizer.tokenizer.id_to_token(token)
        if written is None:
            return b""
        if token in self._added:
            return written.encode()
        if self._byte_level:
            return b"".join(_BYTES[char] if char in _BYTES else char.encode() for char in written)
        byte = BYTE.fullmatch(written)
        return bytes.fromhex(byte[1]) if byte else written.replace(WORD_START, " ").encode()

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self.tokenizer.tokenizer.get_added_tokens_decoder())

    @cached_property
    def _byte_level(self) -> bool:
        """Whether pieces are written in the alphabet of GPT-2, a character for each byte."""
        return '"ByteLevel"' in json.dumps(json.loads(self.tokenizer.tokenizer.to_str()).get("decoder"))


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's: printable bytes stand for themselves, the others for characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    pairs = [(byte, byte) for byte in printable] + [(byte, 256 + at) for at, byte in enumerate(others)]
    return {chr(char): bytes([byte]) for byte, char in pairs}


_BYTES = _byte_alphabet()
