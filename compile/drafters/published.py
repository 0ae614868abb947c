"""Directories and files of published drafters: config.json, tensors, and a module that takes all of them and no
others."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from ...errors import BuildError

FILES = ("model.safetensors", "pytorch_model.bin")
INDEX = "model.safetensors.index.json"  # of weights in several files


def renamed(names: Sequence[tuple[str, str]], name: str) -> str:
    """A published name of a tensor as ours: by the first pair of a pattern and a template that fits, else as it is."""
    for pattern, own in names:
        if match := re.fullmatch(pattern, name):
            return match.expand(own)
    return name


def folder_of(name: str) -> Path:
    """The directory of a drafter, which may be given as its weights file."""
    path = Path(name).expanduser()
    return path.parent if path.is_file() else path


def config_of(name: str) -> dict[str, Any] | None:
    """What config.json beside the weights says; None where there is none that parses as an object."""
    path = folder_of(name) / "config.json"
    try:
        data = json.loads(path.read_text()) if path.is_file() else None  # a pipe would be waited for
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def weight_files(name: str, known: Sequence[str] = FILES) -> list[Path]:
    """The files with a drafter's weights: the one that is given, those of an index, or the first that is there of the
    known names. None where there are none."""
    given = Path(name).expanduser()
    if given.is_file():
        return [given]
    try:
        parts = json.loads((given / INDEX).read_text())["weight_map"].values() if (given / INDEX).is_file() else ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        parts = ()
    return [given / part for part in sorted(set(parts))] or [given / f for f in known if (given / f).is_file()][:1]


def tensor_names(name: str, known: Sequence[str] = FILES) -> set[str]:
    """The names of a drafter's tensors, which are not read; none where there is no file that can be read."""
    try:
        return {key for path in weight_files(name, known) for key in _names(path)}
    except Exception:  # both loaders raise anything
        return set()


def _names(path: Path) -> list[str]:
    if path.suffix != ".safetensors":
        return list(torch.load(path, map_location="meta", weights_only=True))
    with safe_open(path, "pt") as tensors:
        return list(tensors.keys())


def read_tensors(name: str, known: Sequence[str] = FILES) -> dict[str, Tensor]:
    """A drafter's tensors under the names that they have there. Never unpickles code. Raises BuildError."""
    found = weight_files(name, known)
    tensors: dict[str, Tensor] = {}
    if not found:
        raise BuildError(f"drafter: {name}: expected {' or '.join(known)}, got neither")
    for path in found:
        try:
            tensors |= (
                load_file(path)
                if path.suffix == ".safetensors"
                else dict(torch.load(path, map_location="cpu", weights_only=True))
            )
        except Exception as error:  # both loaders raise anything
            raise BuildError(
                f"drafter: {path}: expected readable tensors, got {type(error).__name__}: {error}"
            ) from None
    if odd := [key for key, value in tensors.items() if not isinstance(value, Tensor)]:
        raise BuildError(f"drafter: {name}: expected tensors alone, got {odd[0]}: {type(tensors[odd[0]]).__name__}")
    return tensors


def read_some(name: str, wanted: Collection[str]) -> dict[str, Tensor]:
    """Some tensors of a directory by their names; the others, which may be a whole model's, are not read. Raises
    BuildError."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(name):
        if path.suffix != ".safetensors":
            raise BuildError(f"drafter: {path}: expected safetensors, got another kind of file")
        with safe_open(path, "pt") as held:
            tensors |= {key: held.get_tensor(key) for key in held.keys() if key in wanted}  # noqa: SIM118 (not a dict)
    return tensors


def fill(name: str, module: nn.Module, tensors: Mapping[str, Tensor], without: Collection[str] = ()) -> None:
    """Put the tensors into the module, all of them and no others; `without`: beginnings of the names of what the module
    has already. Raises BuildError."""
    own = {key: value for key, value in module.state_dict().items() if not key.startswith((*without,))}
    problems = [f"missing {key}" for key in sorted(set(own) - set(tensors))]
    problems += [f"unexpected {key}" for key in sorted(set(tensors) - set(own))]
    problems += [
        f"{key}: expected {list(own[key].shape)}, got {list(tensors[key].shape)}"
        for key in sorted(set(tensors) & set(own))
        if tensors[key].shape != own[key].shape
    ]
    if problems:
        raise BuildError(f"drafter: {name}: tensors do not fit: {'; '.join(problems)}")
    module.load_state_dict(dict(tensors), strict=False)


def linear(weight: Tensor) -> nn.Linear:
    """A linear layer with that weight, which is not copied."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight)
    return made
