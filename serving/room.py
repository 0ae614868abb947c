"""What is asked is counted before it is rendered or tokenised."""

from typing import Any

from .field_errors import too_long
from .served import Served

PLENTY = 2**14  # characters of keys and roles, of which templates write few


def require_room(served: Served, name: str, data: Any) -> None:
    """A text, or data that a template may write, if a row can hold it. Raises ApiError, which says name."""
    size = len(data) if isinstance(data, str) else _size(data)
    if size > served.most_characters + (0 if isinstance(data, str) else PLENTY):
        raise too_long(name, served.most_tokens, f"{size} characters")


def _size(data: Any) -> int:
    """Characters of all texts in data, keys included, and of integers about as many as they have digits."""
    size, open_ = 0, [data]
    while open_:
        each = open_.pop()
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, dict):
            open_ += [*each.keys(), *each.values()]
        elif isinstance(each, list):
            open_ += each
        elif isinstance(each, int):
            size += each.bit_length() // 3
    return size
