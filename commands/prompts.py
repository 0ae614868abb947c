"""Prompts from a file of JSON lines, for the commands that run an engine on them."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import InputError

if TYPE_CHECKING:
    from ..runtime.engine import Engine
    from ..runtime.request import Request

LINES = (
    'JSON lines with "prompt", "token_ids" or "turns" (the first counts), and "id" and "category" where they have one'
)


class Entry(NamedTuple):
    """A prompt: its id, its text or token ids, or the error in place of one that cannot be read, and its category."""

    id: Any
    prompt: str | list[int] | InputError
    category: str = ""


def read_prompts(file: str) -> list[Entry]:
    """Read a file of prompts, an entry for each line that is not empty. Raises InputError for an unreadable file."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prompts: expected a readable file of JSON lines, got {file}: {error}") from None
    return [_entry(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _entry(number: int, line: str) -> Entry:
    """The line's entry; one without an id is named by its line number."""
    place = f"prompts: line {number}"
    try:
        fields = json.loads(line)
    except ValueError as error:
        return Entry(number, InputError(f"{place}: expected a JSON object, got {error}"))
    if not isinstance(fields, dict):
        return Entry(number, InputError(f"{place}: expected a JSON object, got {line[:60]}"))
    name, category, turns = fields.get("id", number), str(fields.get("category", "")), fields.get("turns")
    text, tokens = fields.get("prompt"), fields.get("token_ids")
    if isinstance(turns, list) and turns and text is None:
        text = turns[0]
    if isinstance(text, str) and tokens is None:
        return Entry(name, text, category)
    if isinstance(tokens, list) and text is None:
        return Entry(name, tokens, category)
    wanted = '"prompt" (text), "token_ids" (a list) or "turns" (a list of texts)'
    return Entry(name, InputError(f"{place}: expected {wanted}, got {sorted(fields)}"), category)


def make_requests(
    engine: "Engine", entries: Sequence[Entry], max_new_tokens: int | None, *, chat: bool, ignore_eos: bool = False
) -> list[tuple[Entry, "Request"]]:
    """A request for each usable prompt; what is wrong with the others goes to standard error, a line each."""
    requests = []
    for entry in entries:
        try:
            if isinstance(entry.prompt, InputError):
                raise entry.prompt
            name = f"prompt {entry.id}"
            made = engine.request(entry.prompt, max_new_tokens, chat=chat, ignore_eos=ignore_eos, name=name)
            requests.append((entry, made))
        except InputError as error:  # the other prompts still run
            print(f"specstep: {error}", file=sys.stderr)
    return requests
