"""Reads objects of JSON from files that others wrote."""

import json
from pathlib import Path
from typing import Any

from ..errors import BuildError, one_line


def read_object(path: Path, option: str = "model") -> dict[str, Any]:
    """An object of JSON, empty where there is no file. option: which one named the file, for errors. Raises BuildError
    for what is no object, or is nested too deep."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise BuildError(f"{option}: {path}: expected JSON, got {one_line(error)}") from None
    if not isinstance(found, dict):
        raise BuildError(f"{option}: {path}: expected an object, got {found!r:.40}")
    return found
