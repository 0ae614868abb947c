"""Write an engine directory. It appears whole or not at all."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from ..errors import BuildError
from ..kernels.native import CompilerError
from ..runtime.engine_file import MANIFEST, WEIGHTS, EngineSpec, Manifest, file_entry
from ..runtime.text.tokenizer import CHAT_TEMPLATE, TOKENIZER
from .conversations import chat_template
from .lowered import Lowered
from .source import Source
from .swap import replace, work_folder
from .tensors_file import save_tensors


@contextlib.contextmanager
def engine_directory(output: Path) -> Iterator[Path]:
    """A fresh folder beside `output` that takes its place when the block ends well, and vanishes when it does not.

    An engine that stood there is replaced only then, in one step: whoever has loaded it goes on with it. Anything else
    that stands there is refused. Raises BuildError.
    """
    place = Path(os.path.realpath(output))  # a link keeps pointing where it does
    if place.exists() and not (place / MANIFEST).is_file() and (not place.is_dir() or any(place.iterdir())):
        raise BuildError(
            f"output: expected a new path or an engine to replace, got {output}, which holds something else"
        )
    try:
        with work_folder(place) as work:
            yield work
            replace(work, place)
    except (OSError, SafetensorError) as error:  # a full disk, most likely
        reason = getattr(error, "strerror", None) or error
        raise BuildError(f"output: {output}: could not be written: {reason}") from error
    except CompilerError as error:
        raise BuildError(str(error)) from None


def write_weights(directory: Path, programs: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, str]]:
    """Write each tensor once -> for each program, {constant: name in the file}. programs: name -> constants by name."""
    stored: dict[tuple[Any, ...], str] = {}
    tensors: dict[str, Tensor] = {}
    names: dict[str, dict[str, str]] = {name: {} for name in programs}
    for program, constants in programs.items():
        for constant, held in constants.items():
            tensor = held.detach()
            key = identity(tensor) if tensor.numel() else (constant, program)
            if key not in stored:
                stored[key] = f"{program}/{constant}" if constant in tensors else constant
                tensors[stored[key]] = tensor.cpu().contiguous()
            names[program][constant] = stored[key]
    save_tensors(tensors, directory / WEIGHTS)
    return names


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """What two tensors have in common when they are the same data, read in the same way."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def write_tokenizer(directory: Path, source: Source) -> None:
    """Write tokenizer.json and the chat template, where the model has them. Raises BuildError."""
    if source.tokenizer is None:
        return
    source.tokenizer.backend_tokenizer.save(str(directory / TOKENIZER))
    template = chat_template(source)
    if template is not None:
        (directory / CHAT_TEMPLATE).write_text(template, encoding="utf-8")


def write_manifest(directory: Path, spec: EngineSpec, lowered: Lowered, about: dict[str, Any]) -> None:
    """Write manifest.json, last of all: a directory without it is no engine."""
    files = {path.name: file_entry(path) for path in sorted(directory.iterdir())}
    spec = dataclasses.replace(spec, **lowered.programs)  # type: ignore[arg-type]
    manifest = Manifest(spec, lowered.requires, about, files)
    (directory / MANIFEST).write_text(manifest.to_json())
