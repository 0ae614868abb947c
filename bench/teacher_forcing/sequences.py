"""The fixed text as token ids: the same for every engine, without special tokens but for what begins every prompt."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specstep.errors import InputError

SHORTEST = 8  # tokens of a sequence that is worth a pass


def read_sequences(file: Path, tokenizer: Any, length: int, limit: int) -> list[list[int]]:
    """A file's text in sequences of at most `length` tokens, at most `limit` tokens in all; each starts with no
    history. A plain text is one document; of JSON lines each is one: its `turns`, or its `prompt`. Raises InputError.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"text: expected a readable file, got {file}: {error}") from None
    documents = _documents(text) if file.suffix in (".jsonl", ".json") else [text]
    begin, cut = tokenizer("")["input_ids"][:1], []  # without it Gemma's attention has no place to rest
    step = length - len(begin)
    for document in documents:
        ids = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        cut += [begin + ids[at : at + step] for at in range(0, len(ids), step)]
    sequences = _at_most(limit, [ids for ids in cut if len(ids) >= SHORTEST])
    if not sequences:
        raise InputError(f"text: expected at least {SHORTEST} tokens, got fewer in {file}")
    return sequences


def _documents(lines: str) -> list[str]:
    documents = []
    for number, line in enumerate(lines.split("\n"), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            found = fields["turns"] if "turns" in fields else [fields["prompt"]]
            documents.append("\n\n".join(found))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f'text: line {number}: expected JSON with "turns" or "prompt", got {error!r}') from None
    return documents


def _at_most(limit: int, sequences: Sequence[list[int]]) -> list[list[int]]:
    """Evenly spread sequences, so that every kind of text of a file is among them."""
    total = sum(map(len, sequences))
    if total <= limit:
        return list(sequences)
    kept, passed, taken = [], 0, 0
    for ids in sequences:
        passed += len(ids)
        if taken + len(ids) <= passed * limit / total:
            kept.append(ids)
            taken += len(ids)
    return kept
