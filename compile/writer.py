"""Write an engine directory. It appears whole or not at all."""

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.export import ExportedProgram

from ..kernels.linear import detect_instruction_set
from ..runtime.aoti import machine
from ..runtime.engine_file import MANIFEST, WEIGHTS, EngineSpec, Manifest, ProgramSpec, file_entry
from ..runtime.errors import BuildError
from ..runtime.text import CHAT_TEMPLATE, TOKENIZER
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
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_weights(directory: Path, programs: dict[str, tuple[ExportedProgram, list[str]]]) -> dict[str, dict[str, str]]:
    """Write each tensor once -> for each program, {constant: name in the file}.

    programs: name -> (exported graph, the constants that its compiled form wants).
    """
    stored: dict[tuple[Any, ...], str] = {}
    tensors: dict[str, Tensor] = {}
    names: dict[str, dict[str, str]] = {}
    for program, (exported, wanted) in programs.items():
        held = {**exported.state_dict, **exported.constants}
        names[program] = {}
        for constant in wanted:
            tensor = held[constant].detach()
            shared = constant in exported.state_dict
            key = (
                (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
                if tensor.numel()
                else (constant, program)
            )
            if key not in stored:
                stored[key] = constant if shared else f"{program}/{constant}"
                tensors[stored[key]] = tensor.cpu().contiguous()
            names[program][constant] = stored[key]
    save_file(tensors, str(directory / WEIGHTS))
    return names


def write_tokenizer(directory: Path, source: Source) -> None:
    """Write tokenizer.json and the chat template, where the model has them."""
    if source.tokenizer is None:
        return
    source.tokenizer.backend_tokenizer.save(str(directory / TOKENIZER))
    if source.tokenizer.chat_template:
        (directory / CHAT_TEMPLATE).write_text(source.tokenizer.chat_template)


def write_manifest(directory: Path, spec: EngineSpec, programs: dict[str, ProgramSpec], about: dict[str, Any]) -> None:
    """Write manifest.json, last of all: a directory without it is no engine."""
    files = {path.name: file_entry(path) for path in sorted(directory.iterdir())}
    spec = dataclasses.replace(spec, **programs)  # type: ignore[arg-type]
    manifest = Manifest(spec, requires(spec.device), about, files)
    with (directory / MANIFEST).open("w") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())


def requires(device: str) -> dict[str, Any]:
    """What a machine needs to run what is compiled on this one."""
    here = machine()
    needs = {"torch": here["torch"], "architecture": here["architecture"]}
    if device == "cuda":
        return needs | {"cuda_capability": here["cuda_capability"], "cuda": here["cuda"]}
    isa = [*str(torch._inductor.cpu_vec_isa.pick_vec_isa()).split(), detect_instruction_set()]
    return needs | {"instructions": [flag for flag in here["instructions"] if flag in instruction_flags(isa)]}


def instruction_flags(isa: list[str]) -> set[str]:
    """The operating system's names of the instructions that a vector ISA, as Inductor and we name them, stands for."""
    wide = {"avx512f", "avx512dq", "avx512vl", "avx512bw", "avx2", "fma"}
    flags = {
        "avx2": {"avx2", "fma"},
        "avx512": wide,
        "avx512_vnni": {"avx512_vnni"},
        "avx512_bf16": wide | {"avx512_bf16"},
    }
    flags |= {"amx_tile": {"amx_tile", "amx_int8", "amx_bf16"}, "asimd": {"asimd"}}
    return set().union(*(flags.get(name, set()) for name in isa))
