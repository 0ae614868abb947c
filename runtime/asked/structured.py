"""What a user may ask of the form of an output, checked when it is made. Names as in vLLM's `structured_outputs`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InputError

WAYS = ("lenient", "whole", "disable_any_whitespace")
FORMS = ("json", "json_object", "regex", "choice", "grammar")
MOST_TEXT = 2**20  # characters of a grammar


def checked_structured(name: str, value: Any) -> dict[str, Any]:
    """A mapping with one of FORMS, and perhaps of WAYS. json: a JSON schema, or the text of one. json_object: True.
    regex: Rust's, for the whole output. choice: texts, one of which is the output. grammar: GBNF, or Lark with `start`.
    lenient: whether keywords of a schema that cannot be kept are ignored. whole: whether it is all of an answer, where
    a model thinks, and not what comes after its reasoning. disable_any_whitespace: whether the blanks of a document are
    fixed: one behind each comma and colon. Raises InputError."""
    if not isinstance(value, Mapping):
        raise InputError(f"{name}: expected a mapping with one of {', '.join(FORMS)}, got {value!r:.60}")
    given = {key: each for key, each in value.items() if each is not None and not (key == "json_object" and not each)}
    ways = {way: given.pop(way, False) for way in WAYS}
    kind, *more = given or [""]
    if more or kind not in FORMS:
        got = ", ".join(map(repr, given)) or "none"
        raise InputError(f"{name}: expected one of {', '.join(FORMS)}, and perhaps {', '.join(WAYS)}, got {got:.60}")
    for way, wanted in ways.items():
        if not isinstance(wanted, bool):
            raise InputError(f"{name}: {way}: expected True or False, got {wanted!r:.60}")
    return {kind: _CHECKS[kind](f"{name}: {kind}", given[kind]), **ways}


def _schema(name: str, value: Any) -> str:
    """The text of a schema, which no later change of the mapping reaches."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{name}: expected a JSON schema, got what is none ({error})") from None
    if not isinstance(schema, Mapping | bool):
        raise InputError(f"{name}: expected a JSON schema, an object, got {value!r:.60}")
    return _text(name, text)


def _object(name: str, value: Any) -> bool:
    if value is not True:
        raise InputError(f"{name}: expected True, got {value!r:.60}")
    return True


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InputError(f"{name}: expected a text that is not empty, got {value!r:.60}")
    if len(value) > MOST_TEXT:
        raise InputError(f"{name}: expected at most {MOST_TEXT} characters, got {len(value)}")
    return value


def _choice(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise InputError(f"{name}: expected a list of texts, at least one, got {value!r:.60}")
    return tuple(_text(f"{name}[{index}]", each) for index, each in enumerate(value))


_CHECKS = {"json": _schema, "json_object": _object, "regex": _text, "choice": _choice, "grammar": _text}
