"""Reads SentencePiece's `tokenizer.model`, as Llama's and Gemma's directories have it, by its layout in Protocol
Buffers (sentencepiece_model.proto)."""

import struct
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .gguf.file import GgufFile
from .gguf.metadata import Metadata
from .gguf.special_tokens import CONTROL, USER_DEFINED
from .gguf.tokenizer import SPACE, read_tokenizer

NORMAL, UNUSED = 1, 5  # types of pieces, beside CONTROL and USER_DEFINED: GGUF's are the same
PAIRS = 2  # model_type of merged pairs
SPECIAL = {"bos": 41, "eos": 42, "padding": 43}  # fields of trainer_spec with their ids
KEYS = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token"}
Fields = Mapping[int, list[Any]]  # number of a field -> its values


class Piece(NamedTuple):
    """A token. score: of several pairs that may be merged, the one that makes the piece of the highest is."""

    text: str
    score: float
    type: int


def read_sentencepiece(file: Path, settings: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """A tokenizer of merged pairs. settings: of tokenizer_config.json. Raises ValueError that says what was expected
    and what is there, or BuildError."""
    try:
        model = _fields(file.read_bytes())
        trainer, normalizer = (_fields(model[number][0]) for number in (2, 3))
        pieces = [_piece(_fields(piece)) for piece in model[1]]
    except (LookupError, UnicodeDecodeError, struct.error, TypeError):
        raise ValueError("a model of SentencePiece, got a damaged file or one of another kind") from None
    _check(trainer, normalizer, pieces)
    prefix = bool(_last(normalizer, 3, 1))
    if settings.get("add_prefix_space", prefix) != prefix:
        raise ValueError(f"add_prefix_space {prefix} as the model has it, got {settings['add_prefix_space']}")
    pieces = _with_added(pieces, settings.get("added_tokens_decoder") or {})
    fast = _built(file, pieces, prefix, settings, trainer)
    if prefix and settings.get("legacy") is False:  # a space ahead of the text, not of what follows each special token
        fast.backend_tokenizer.normalizer = None
        first = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
        fast.backend_tokenizer.pre_tokenizer = first
    return fast


def _built(
    file: Path, pieces: list[Piece], prefix: bool, settings: Mapping[str, Any], trainer: Fields
) -> PreTrainedTokenizerFast:
    """As the reader of GGUF builds one from the same pieces."""
    texts = [piece.text for piece in pieces]
    values: dict[str, Any] = {
        "model": "llama",
        "tokens": texts,
        "scores": [piece.score for piece in pieces],
        "token_type": [piece.type for piece in pieces],
        "add_space_prefix": prefix,
        "unknown_token_id": _last(trainer, 40, 0),
        "add_bos_token": settings.get("add_bos_token", True),
        "add_eos_token": settings.get("add_eos_token", False),
    }
    for name, number in SPECIAL.items():
        token, id = settings.get(KEYS[name]), _last(trainer, number, len(texts))
        text = token["content"] if isinstance(token, dict) else token
        if text is not None and text not in texts:
            raise ValueError(f"a {KEYS[name]} of the vocabulary, got {text!r}")
        if text is not None or id < len(texts):  # no id is -1, as a large number
            values[f"{name}_token_id"] = id if text is None else texts.index(text)
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    fast, _ = read_tokenizer(Metadata(GgufFile(file, metadata, {}), str(file.parent)), len(texts))
    assert fast is not None
    return fast


def _check(trainer: Fields, normalizer: Fields, pieces: list[Piece]) -> None:
    """Refuse what another tokenizer would be made of. Raises ValueError."""
    if _last(trainer, 3, 1) != PAIRS:
        raise ValueError(f"model_type {PAIRS} (BPE), got {_last(trainer, 3, 1)}")
    found = {
        "no precompiled_charsmap": bool(_last(normalizer, 2, b"")),
        "remove_extra_whitespaces false": bool(_last(normalizer, 4, 1)),
        "escape_whitespaces true": not _last(normalizer, 5, 1),
        "treat_whitespace_as_suffix false": bool(_last(trainer, 24, 0)),
        "no piece of type UNUSED": any(piece.type == UNUSED for piece in pieces),
        "no user-defined piece with a space": any(
            piece.type == USER_DEFINED and (SPACE in piece.text or " " in piece.text) for piece in pieces
        ),
    }
    for expected, odd in found.items():
        if odd:
            raise ValueError(f"{expected}, got another one")


def _with_added(pieces: list[Piece], added: Mapping[str, Any]) -> list[Piece]:
    """The pieces and the tokens that the config names: those past the end are new. Raises ValueError."""
    pieces = list(pieces)
    for id, token in sorted((int(id), token) for id, token in added.items()):
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            raise ValueError(f"added tokens that strip nothing, got {token['content']!r}")
        if id > len(pieces) or (id < len(pieces) and pieces[id].text != token["content"]):
            there = pieces[id].text if id < len(pieces) else None
            raise ValueError(f"added token {id} to be {there!r}, got {token['content']!r}")
        kind = CONTROL if token.get("special") else USER_DEFINED
        if id == len(pieces):
            pieces.append(Piece(token["content"], 0.0, kind))
        elif pieces[id].type == NORMAL:
            pieces[id] = pieces[id]._replace(type=kind)
    return pieces


def _piece(fields: Fields) -> Piece:
    (score,) = struct.unpack("<f", _last(fields, 2, bytes(4)))
    return Piece(fields[1][0].decode("utf-8"), score, _last(fields, 3, NORMAL))


def _last(fields: Fields, number: int, default: Any) -> Any:
    return fields[number][-1] if number in fields else default


def _fields(data: bytes) -> dict[int, list[Any]]:
    """The fields of a message: integers of varints, bytes of all else. Raises IndexError for a damaged one."""
    found, at = defaultdict[int, list[Any]](list), 0
    value: Any
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
        else:
            size, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}.get(kind, len(data) + 1), at)
            if at + size > len(data):
                raise IndexError
            value, at = data[at : at + size], at + size
        found[key >> 3].append(value)
    return dict(found)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(the number, where it ends)."""
    value, shift = 0, 0
    while True:
        byte = data[at]
        value, at = value | (byte & 127) << shift, at + 1
        if byte < 128:
            return value, at
        shift += 7
