"""Text to learn from, as sequences of token ids: JSON lines of dialogues or of token ids, plain or gzipped, and what
`specstep collect` wrote."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...compile.drafters.ngram_file import tokenizer_hash
from ...errors import InputError
from .reader import Data

BATCH = 512  # dialogues that go through the tokenizer at a time


class Text(NamedTuple):
    """Token ids of a sequence, and how many of them at its start are context only: the prompt."""

    tokens: list[int]
    prompt: int


def read(files: Sequence[str], tokenizer: Any, vocabulary: int | None) -> Iterator[Text]:
    """Sequences of data directories and of JSON-lines files, in order. A line is a dialogue ("prompt", "response":
    text), what `specstep generate --json` prints, or plain "token_ids". Raises InputError naming file and line."""
    for file in files:
        if Path(file).is_dir():
            yield from _collected(file, tokenizer, vocabulary)
        else:
            yield from encode_lines(lines(file), tokenizer, vocabulary)


def encode_lines(
    entries: Iterable[tuple[str, dict[str, Any]]], tokenizer: Any, vocabulary: int | None
) -> Iterator[Text]:
    """What `lines` yields -> the sequences. Raises InputError naming the place of a bad one."""
    dialogues, place = list[dict[str, str]](), ""
    for place, entry in entries:
        if isinstance(entry.get("prompt"), str) and isinstance(entry.get("response"), str):
            if tokenizer is None:
                raise InputError(f"{place}: expected a model with a tokenizer (--model) or token_ids, got text")
            dialogues.append(entry)
            if len(dialogues) == BATCH:
                yield from _encode_known(place, dialogues, tokenizer, vocabulary)
                dialogues = []
        else:
            yield _ids(place, entry, vocabulary)
    yield from _encode_known(place, dialogues, tokenizer, vocabulary)


def _encode_known(
    place: str, dialogues: list[dict[str, str]], tokenizer: Any, vocabulary: int | None
) -> Iterator[Text]:
    """As `encode`, of tokens that the model has. Raises InputError naming the last line that was read."""
    for text in encode(dialogues, tokenizer):
        _check_ids(f"up to {place}", text.tokens, vocabulary)
        yield text


def _collected(folder: str, tokenizer: Any, vocabulary: int | None) -> Iterator[Text]:
    """Sequences of a data directory, once it is known to be of the tokenizer."""
    data = Data(folder)
    if tokenizer is not None and vocabulary is not None:
        data.manifest.check_same(folder, vocabulary, tokenizer_hash(tokenizer))
    for tokens, prompt in data.texts():
        yield Text(tokens.tolist(), prompt)


def lines(file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of each line of a file, plain or gzipped, that is not empty. Raises InputError."""
    path = Path(file)
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as text:
            for number, line in enumerate(text, 1):
                if line.strip():
                    yield f"{path}: line {number}", _object(f"{path}: line {number}", line)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"data: expected a readable file of JSON lines, got {file}: {error}") from None


def _object(place: str, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:  # the latter where it is nested too deep
        raise InputError(f"{place}: expected a JSON object, got {error}") from None
    if not isinstance(entry, dict):
        raise InputError(f"{place}: expected a JSON object, got {line[:60].strip()}")
    return entry


def _ids(place: str, entry: dict[str, Any], vocabulary: int | None) -> Text:
    prompt, tokens = entry.get("prompt_token_ids", []), entry.get("token_ids")
    if not isinstance(tokens, list) or not isinstance(prompt, list):
        raise InputError(f'{place}: expected "prompt" and "response", or "token_ids" (a list), got {sorted(entry)}')
    _check_ids(place, [*prompt, *tokens], vocabulary)
    return Text([*prompt, *tokens], len(prompt))


def _check_ids(place: str, tokens: Sequence[Any], vocabulary: int | None) -> None:
    highest = float("inf") if vocabulary is None else vocabulary
    odd = [token for token in tokens if type(token) is not int or not 0 <= token < highest]
    if odd:
        raise InputError(
            f"{place}: expected token ids from 0 to {highest - 1}, got {odd[0]!r}: ids of another tokenizer?"
        )


def encode(dialogues: list[dict[str, str]], tokenizer: Any) -> Iterator[Text]:
    """The prompt in the chat template, if the tokenizer has one, and the response as the model would go on."""
    if not dialogues:
        return
    prompts = [entry["prompt"] for entry in dialogues]
    if tokenizer.chat_template:
        turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
        prompts = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    before = tokenizer(prompts, add_special_tokens=not tokenizer.chat_template)["input_ids"]
    after = tokenizer([entry["response"] for entry in dialogues], add_special_tokens=False)["input_ids"]
    for prompt, response in zip(before, after, strict=True):
        yield Text([*prompt, *response], len(prompt))
