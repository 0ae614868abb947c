"""The tensors of a directory's safetensors files, and its objects of JSON."""

from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from ...errors import BuildError
from ..json_object import read_object


def places(folder: Path) -> dict[str, Path]:
    """Name of a tensor -> its file. Raises BuildError."""
    index = read_object(folder / "model.safetensors.index.json").get("weight_map")
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
