"""Small files that commands write."""

from pathlib import Path

from ..errors import InputError


def write(file: str, text: str) -> None:
    """Write a text. Raises InputError when it cannot be."""
    try:
        Path(file).write_text(text)
    except OSError as error:
        raise InputError(f"output: expected a path that can be written, got {file}: {error.strerror}") from None
