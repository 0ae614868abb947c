"""The tensors of a directory's safetensors files, and its objects of JSON."""

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from ...errors import BuildError, one_line


def places(folder: Path) -> dict[str, Path]:
    """Name of a tensor -> its file. Raises BuildError."""
    index = read_json(folder / "model.safetensors.index.json").get("weight_map")
    if index is not None:
        return {name: folder / file for name, file in index.items()}
    file = folder / "model.safetensors"
    with _open(file) as held:
        return dict.fromkeys(held.keys(), file)


def read(file: Path, name: str) -> Tensor:
    """A tensor. Raises BuildError."""
    with _open(file) as held:
        tensor: Tensor = held.get_tensor(name)
        return tensor


def _open(file: Path) -> Any:
    try:
        return safe_open(file, "pt")
    except Exception as error:  # of several kinds
        raise BuildError(f"model: {file}: expected a safetensors file, got {str(error).splitlines()[0]}") from None


def read_json(path: Path) -> dict[str, Any]:
    """An object of JSON, empty where there is no file. Raises BuildError."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BuildError(f"model: {path}: expected JSON, got {one_line(error)}") from None
    if not isinstance(found, dict):
        raise BuildError(f"model: {path}: expected an object, got {found!r:.40}")
    return found
