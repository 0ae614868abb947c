"""Write an engine directory. It appears whole or not at all."""

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..errors import BuildError
from ..kernels.linear import CompilerError
from ..runtime.engine_file import MANIFEST, WEIGHTS, EngineSpec, Manifest, file_entry
from ..runtime.text import CHAT_TEMPLATE, TOKENIZER
from .lowered import Lowered
from .source import Source


@contextlib.contextmanager
def engine_directory(output: Path) -> Iterator[Path]:
    """A fresh folder beside `output` that takes its place when the block ends well, and vanishes when it does not.

    An engine that stood there is replaced only then; anything else that stands there is refused. Raises BuildError.
    """
    if output.exists() and not (output / MANIFEST).is_file() and (not output.is_dir() or any(output.iterdir())):
        raise BuildError(
            f"output: expected a new path or an engine to replace, got {output}, which holds something else"
        )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    except OSError as error:
        raise BuildError(f"output: expected a path that can be written, got {output}: {error.strerror}") from None
    try:
        yield work
        if output.exists():
            shutil.rmtree(output)
        work.chmod(0o755)
        work.rename(output)
    except (OSError, SafetensorError) as error:  # a full disk, most likely
        reason = getattr(error, "strerror", None) or error
        raise BuildError(f"output: {output}: could not be written: {reason}") from error
    except CompilerError as error:
        raise BuildError(str(error)) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_weights(directory: Path, programs: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, str]]:
    """Write each tensor once -> for each program, {constant: name in the file}. programs: name -> constants by name."""
    stored: dict[tuple[Any, ...], str] = {}
    tensors: dict[str, Tensor] = {}
    names: dict[str, dict[str, str]] = {name: {} for name in programs}
    for program, constants in programs.items():
        for constant, held in constants.items():
            tensor = held.detach()
            key = (
                (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
                if tensor.numel()
                else (constant, program)
            )
            if key not in stored:
                stored[key] = f"{program}/{constant}" if constant in tensors else constant
                tensors[stored[key]] = tensor.cpu().contiguous()
            names[program][constant] = stored[key]
    save_file(tensors, str(directory / WEIGHTS))
    return names


def write_tokenizer(directory: Path, source: Source) -> None:
    """Write tokenizer.json and the chat template, where the model has them. Raises BuildError."""
    if source.tokenizer is None:
        return
    source.tokenizer.backend_tokenizer.save(str(directory / TOKENIZER))
    template = chat_template(source)
    if template is not None:
        (directory / CHAT_TEMPLATE).write_text(template, encoding="utf-8")


def chat_template(source: Source) -> str | None:
    """The model's chat template, None where it has none; of several named ones the default. Raises BuildError."""
    templates = source.tokenizer.chat_template
    if isinstance(templates, list):  # as tokenizer_config.json writes them
        templates = {entry["name"]: entry["template"] for entry in templates}
    if not isinstance(templates, dict):
        return templates or None
    if "default" not in templates:
        known = ", ".join(sorted(templates)) or "none"
        raise BuildError(
            f"model: {source.name}: chat_template: expected one template or one named default, got {known}"
        )
    return templates["default"]


def write_manifest(directory: Path, spec: EngineSpec, lowered: Lowered, about: dict[str, Any]) -> None:
    """Write manifest.json, last of all: a directory without it is no engine."""
    files = {path.name: file_entry(path) for path in sorted(directory.iterdir())}
    spec = dataclasses.replace(spec, **lowered.programs)  # type: ignore[arg-type]
    manifest = Manifest(spec, lowered.requires, about, files)
    with (directory / MANIFEST).open("w") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
