"""What an engine learned of its own answers, on disk: one safetensors file, written whole or not at all.

learned [R + 1, 16] int64: see `kernels/ngram/learned.py`. The header names the format, the vocabulary and the
tokenizer.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..controls import LEARNED_COUNTS, LEARNED_TOKENS
from ..errors import EngineError, InputError
from ..user_cache import keep
from .engine_file import EngineSpec
from .session import Session
from .text.tokenizer import EngineTokenizer

FORMAT = "specstep.learned.1"
NAME = "learned"
REMEDY = "name another file, which is then begun anew"


def tables(spec: EngineSpec) -> list[str]:
    """The names of an engine's learned tables, one for each n-gram drafter of a mixture; they hold the same."""
    return [tensor.name for tensor in spec.shared if tensor.name.rpartition(".")[2] == NAME]


def require_tables(spec: EngineSpec) -> list[str]:
    """`tables`. Raises InputError for an engine that has none."""
    found = tables(spec)
    if not found:
        raise InputError(
            f"learned: expected an engine that learns, got one with drafter {spec.config.get('drafter')} and "
            f"{spec.config.get('learned_rows', 0)} learned rows; build one with an n-gram drafter"
        )
    return found


def start_learned(path: Path, session: Session, text: EngineTokenizer | None) -> None:
    """Put a file's table into a session, if there is one. Raises InputError for an engine that does not learn, and
    EngineError for a file that is damaged, or of another engine."""
    spec, names = session.spec, require_tables(session.spec)
    if not path.exists():
        return
    if not path.is_file():
        raise EngineError(f"{path}: expected a file of format {FORMAT}, got none: a directory, or a pipe; {REMEDY}")
    from safetensors import SafetensorError, safe_open  # engines of ONNX Runtime do without

    try:
        with safe_open(path, "numpy") as file:
            got, table = file.metadata() or {}, file.get_tensor(NAME)
    except (SafetensorError, OSError) as error:
        raise EngineError(f"{path}: expected a file of format {FORMAT}, got {error}; {REMEDY}") from None
    expected = _header_of(spec, text)
    for field, value in expected.items():
        if got.get(field) != value:
            raise EngineError(f"{path}: {field}: expected {value}, got {got.get(field)}; {REMEDY}")
    shape = next(tensor.shape for tensor in spec.shared if tensor.name == names[0])
    if table.shape != shape or table.dtype != np.int64:
        raise EngineError(
            f"{path}: expected a table {list(shape)} of int64, as learned_rows {shape[0] - 1} makes it, got "
            f"{list(table.shape)} of {table.dtype}; {REMEDY}"
        )
    _check(path, table, spec.vocab_size)
    session.write_shared(dict.fromkeys(names, table))


def save_learned(path: Path, session: Session, text: EngineTokenizer | None) -> None:
    """Write a session's table. Raises EngineError where it cannot be written."""
    table = session.read_shared()[require_tables(session.spec)[0]]
    write_table(path, table, _header_of(session.spec, text))


def write_table(path: Path, table: NDArray[Any], header: dict[str, str]) -> None:
    """Write a table, whole or not at all. Raises EngineError."""
    from safetensors.numpy import save

    try:
        keep(path, save({NAME: np.ascontiguousarray(table)}, header))
    except OSError as error:
        raise EngineError(f"learned: {path}: could not be written: {error.strerror or error}") from None


def vocabulary_hash(vocabulary: dict[str, int]) -> str:
    """Equal for two vocabularies exactly when the same ids stand for the same tokens."""
    tokens = sorted((index, token) for token, index in vocabulary.items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def header(vocab_size: int, vocabulary: dict[str, int] | None) -> dict[str, str]:
    """Of a table for a model with so many tokens; vocabulary: its tokenizer's, None without one."""
    tokenizer = "none" if vocabulary is None else vocabulary_hash(vocabulary)
    return {"format": FORMAT, "vocab_size": str(vocab_size), "tokenizer": tokenizer}


def _header_of(spec: EngineSpec, text: EngineTokenizer | None) -> dict[str, str]:
    return header(spec.vocab_size, text.tokenizer.get_vocab() if text else None)


def _check(path: Path, table: NDArray[Any], vocabulary: int) -> None:
    """Raises EngineError for entries that no engine writes."""
    tokens = table // LEARNED_COUNTS % LEARNED_TOKENS
    if (table < 0).any() or (table // LEARNED_COUNTS // LEARNED_TOKENS > 2**31).any() or (tokens >= vocabulary).any():
        raise EngineError(f"{path}: expected token ids below {vocabulary}, got others: the file is damaged; {REMEDY}")
    if table[-1].any():
        raise EngineError(f"{path}: expected an empty last row, got another: the file is damaged; {REMEDY}")
