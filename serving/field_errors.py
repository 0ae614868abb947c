"""What a body gets wrong, as an error that names the field. Needs no server: Triton's front says the same."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError
from .api_error import ApiError
from .unsupported import reason

TOO_LONG = "context_length_exceeded"
NAMES = {  # what the engine calls a field -> what a request does
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_ids": "stop_token_ids",
    "sampling": None,
    "engine": None,
}
# Of a union: what pydantic puts into a path.
BRANCH = re.compile(r"^([A-Z].*|.*\[.*|constrained-.*|str|int|float|bool|none)$")


def too_long(param: str, most: int, got: str) -> ApiError:
    """A prompt that no row can hold."""
    message = f"{param}: expected at most {most} tokens, what the model's context leaves, got {got}"
    return ApiError(400, message, param=param, code=TOO_LONG)


def of_input(error: InputError) -> ApiError:
    """What the engine refuses: its messages begin with the field."""
    text = str(error).removeprefix("prompt: ").removeprefix("sampling: ")
    field, colon, rest = text.partition(":")
    name = re.match(r"\w+", field)
    param = NAMES.get(name[0], name[0]) if colon and name else None
    if name and param and colon:
        text = f"{param}{field[name.end() :]}:{rest}"
    return ApiError(400, text, param=param)


def of_fields(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first field that is wrong, and of the branches of a union the one that went furthest."""
    if any(error["type"] == "json_invalid" for error in errors):
        return ApiError(400, "body: expected JSON, got what does not parse")
    field = _field(errors[0])
    error = max((error for error in errors if _field(error) == field), key=_reached)
    path = _path(error["loc"])
    if not path and error["type"] == "value_error":
        return ApiError(400, str(error["msg"]).removeprefix("Value error, "))
    if not path:
        return ApiError(400, "body: expected a JSON object, with the header Content-Type: application/json")
    if error["type"] == "extra_forbidden":
        return ApiError(400, f"{path}: {reason(path)}", param=path, code="unsupported_parameter")
    message = str(error["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{path}: {message[:1].lower()}{message[1:]}", param=path)


def _reached(error: Mapping[str, Any]) -> tuple[bool, int]:
    """How far a branch went: what has the right type went further than what has not."""
    return not error["type"].endswith("_type"), len(error["loc"])


def _field(error: Mapping[str, Any]) -> Any:
    return error["loc"][1:2]


def _path(place: Sequence[str | int]) -> str:
    """("body", "messages", 0, "content", "str") -> "messages[0].content"."""
    path = ""
    for at, part in enumerate(place[1:]):
        if isinstance(part, int):
            path += f"[{part}]"
        elif at == 0 or not BRANCH.match(part):
            path += f".{part}" if path else part
    return path
