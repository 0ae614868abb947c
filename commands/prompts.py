"""Prompts from a file of JSON lines, for the commands that run an engine on them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import InputError
from ..runtime.text.messages import check_messages
from .sampling_options import NO_SAMPLING, GivenSampling, check_own
from .terminal import complain

if TYPE_CHECKING:
    from ..runtime.asked.request import Request
    from ..runtime.engine import Engine

LINES = (
    'JSON lines with "prompt", "messages" (a conversation), "token_ids" or "turns" (the first counts), and "id", '
    '"category", "chat_template_kwargs", "sampling" and "prediction" where they have one'
)
BOM = "\ufeff"  # what some editors put ahead of a text


class Entry(NamedTuple):
    """A prompt: its id, its text, token ids or messages, or the error in place of one that cannot be read; its
    category, its variables of the chat template, its sampling: fields, "model" or None, and its prediction."""

    id: Any
    prompt: str | list[Any] | InputError
    category: str = ""
    chat_template_kwargs: Mapping[str, Any] = {}
    sampling: Any = None
    prediction: Any = None


def read_prompts(file: str) -> list[Entry]:
    """Read a file of prompts, an entry for each line that is not empty. Raises InputError for an unreadable file."""
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").split("\n")  # not at U+2028, which JSON may hold as it is
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prompts: expected a readable file of JSON lines, got {file}: {error}") from None
    return [_entry(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _entry(number: int, line: str) -> Entry:
    """The line's entry; one without an id is named by its line number."""
    place = f"prompts: line {number}"
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:  # the latter where it is nested too deep
        return Entry(number, InputError(f"{place}: expected a JSON object, got {error}"))
    if not isinstance(fields, dict):
        return Entry(number, InputError(f"{place}: expected a JSON object, got {line[:60]}"))
    name, category = fields.get("id", number), str(fields.get("category", ""))
    arguments = fields.get("chat_template_kwargs") or {}
    if not isinstance(arguments, dict):
        return Entry(name, InputError(f"{place}: chat_template_kwargs: expected an object, got {arguments!r:.60}"))
    try:
        prompt = _prompt(place, fields)
    except InputError as error:
        return Entry(name, error, category)
    try:
        return Entry(name, prompt, category, arguments, check_own(fields.get("sampling")), fields.get("prediction"))
    except InputError as error:
        return Entry(name, InputError(f"{place}: sampling: {str(error).removeprefix('sampling: ')}"), category)


def _prompt(place: str, fields: dict[str, Any]) -> str | list[Any]:
    """The one prompt of a line. Raises InputError."""
    given = {key: fields[key] for key in ("prompt", "messages", "token_ids") if fields.get(key) is not None}
    turns = fields.get("turns")
    if isinstance(turns, list) and turns and not {"prompt", "messages"} & set(given):
        given["prompt"] = turns[0]
    if len(given) == 1:
        [(key, prompt)] = given.items()
        if isinstance(prompt, str if key == "prompt" else list):
            if key == "messages":
                check_messages(prompt, place)
            return prompt
    wanted = '"prompt" (text), "messages" (a list), "token_ids" (a list) or "turns" (a list of texts)'
    raise InputError(f"{place}: expected one of {wanted}, got {sorted(fields)}")


def make_requests(
    engine: "Engine",
    entries: Sequence[Entry],
    max_new_tokens: int | None,
    *,
    chat: bool,
    ignore_eos: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    sampling: GivenSampling = NO_SAMPLING,
    forced_acceptance: bool = False,
) -> list[tuple[Entry, list["Request"]]]:
    """Each usable prompt with the requests of its choices; what is wrong with the others goes to standard error, a line
    each. A prompt's own template arguments, and fields of its own sampling, win over those of all."""
    requests = []
    for entry in entries:
        try:
            if isinstance(entry.prompt, InputError):
                raise entry.prompt
            choices = engine.requests(
                entry.prompt,
                max_new_tokens,
                sampling=sampling.over(engine.recommended, entry.sampling),
                chat=chat,
                ignore_eos=ignore_eos,
                chat_template_kwargs={**(chat_template_kwargs or {}), **entry.chat_template_kwargs},
                forced_acceptance=forced_acceptance,
                prediction=entry.prediction,
                name=f"prompt {entry.id}",
            )
            requests.append((entry, choices))
        except InputError as error:  # the other prompts still run
            complain(str(error))
    return requests
