"""A conversation: messages of the shape that chat APIs share, checked before anything runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InputError

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
CONTENT = 'a text or a list of {"type": "text", "text": ...}'
SHOWN = 60  # characters of a wrong value that an error shows


def check_messages(messages: Any, name: str) -> None:
    """Refuse what is no conversation. `name` stands at the start of the error, as "prompt 3".

    A message has a `role` of ROLES and `content`: a text, or a list of text parts. An assistant's content may be None
    or missing where it has `tool_calls`. Other keys are the chat template's business.

    Raises:
        InputError: not a list of mappings, empty, or a role or content of another shape; names the place.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise _wrong(f"{name}: messages", "a list of mappings", messages)
    if not messages:
        raise InputError(f"{name}: messages: expected at least one message, got an empty list")
    for index, message in enumerate(messages):
        place = f"{name}: messages[{index}]"
        if not isinstance(message, Mapping):
            raise _wrong(place, 'a mapping with "role" and "content"', message)
        role = message.get("role")
        if role not in ROLES:
            got = f"{role!r:.{SHOWN}}" if "role" in message else f"none beside {sorted(map(str, message))}"
            raise InputError(f"{place}.role: expected one of {', '.join(ROLES)}, got {got}")
        calls = message.get("tool_calls")
        if not (message.get("content") is None and role == "assistant" and calls):
            _check_content(f"{place}.content", message)


def _check_content(place: str, message: Message) -> None:
    content = message.get("content")
    if isinstance(content, str):
        return
    if "content" not in message:
        raise InputError(f"{place}: expected {CONTENT}, got no content")
    if not isinstance(content, list | tuple):
        raise _wrong(place, CONTENT, content)
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _wrong(f"{place}[{index}]", '{"type": "text", "text": ...}, the only kind of part', part)


def _wrong(place: str, expected: str, got: Any) -> InputError:
    return InputError(f"{place}: expected {expected}, got {got!r:.{SHOWN}}")
