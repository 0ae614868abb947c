"""Small files that commands read and write."""

from pathlib import Path

from ..errors import InputError


def write(file: str, text: str) -> None:
    """Write a text. Raises InputError when it cannot be."""
    try:
        Path(file).write_text(text)
    except OSError as error:
        raise InputError(f"output: expected a path that can be written, got {file}: {error.strerror}") from None


def read(option: str, file: str) -> str:
    """The text of a file, which an option names. Raises InputError."""
    try:
        return Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{option}: expected a readable file of text, got {file}: {error}") from None
