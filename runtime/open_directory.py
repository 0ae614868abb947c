"""Opens an engine directory: what is in it, read, checked and ready to run."""

import re
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from ..backends import BACKENDS
from ..errors import EngineError, InputError, one_line
from ..progress import OnProgress
from .asked.sampling_params import SamplingParams
from .calls.template import TemplateTools
from .engine_file import REBUILD, Manifest, check_files, check_machine, read_manifest
from .gpu import GIGABYTE, available_memory
from .session import Session
from .text.tokenizer import TOKENIZER, EngineTokenizer

# What the allocators of torch, CUDA and ONNX Runtime say; only Python's own is a MemoryError.
NO_MEMORY = re.compile(
    "can't allocate|not enough memory|out of memory|failed to allocate|bad.?alloc|size .*overflow", re.IGNORECASE
)


class Opened(NamedTuple):
    """What an engine directory holds. recommended: sampling that the model recommends. tools: what its chat template
    knows of them. identity: of the step's program, which tells engines apart."""

    session: Session
    text: EngineTokenizer | None
    recommended: SamplingParams | None
    tools: TemplateTools | None
    identity: str


def open_directory(directory: Path, deep_check: bool, gpu: int | None, progress: OnProgress) -> Opened:
    """Open what `build` wrote; deep_check: hash the weights file too; others: see `load`. Raises EngineError and
    InputError."""
    while True:
        before = _identity(directory)
        try:
            opened = _open(directory, deep_check, gpu, progress)
        except EngineError:
            if _identity(directory) == before:
                raise
        else:
            if _identity(directory) == before:
                return opened
        # Another engine has taken its place in the meantime: what was read is of both.


def _identity(directory: Path) -> tuple[int, int] | None:
    """What tells a directory from another one that takes its name."""
    try:
        found = directory.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _open(directory: Path, deep_check: bool, gpu: int | None, progress: OnProgress) -> Opened:
    """Read, check and open what is there now. Raises EngineError."""
    manifest = read_manifest(directory)
    check_files(directory, manifest, deep_check)
    runner = _runner(manifest)
    check_machine(manifest, runner.machine())
    session = _open_session(runner, directory, manifest, gpu, progress)
    special = manifest.about.get("special_tokens", {})
    text = EngineTokenizer.load(directory, special) if TOKENIZER in manifest.files else None
    identity = manifest.files[manifest.spec.step.file]["sha256"]
    return Opened(session, text, *_about(directory, manifest), identity)


def _about(directory: Path, manifest: Manifest) -> tuple[SamplingParams | None, TemplateTools | None]:
    """Sampling that the model recommends, and what its chat template knows of tools. Raises EngineError."""
    sampling, tools = manifest.about.get("sampling"), manifest.about["tools"]
    try:
        return SamplingParams.of(sampling) if sampling else None, TemplateTools.of(tools) if tools else None
    except InputError as error:
        raise EngineError(f"{directory}/manifest.json: about: {error}; {REBUILD}") from None


def _open_session(
    runner: ModuleType, directory: Path, manifest: Manifest, gpu: int | None, progress: OnProgress
) -> Session:
    """The runner's session. Raises EngineError where its buffers do not fit in memory, or a program does not load."""
    spec = manifest.spec
    tensors = (*spec.state, *spec.shared, *spec.caches)
    needed = sum(tensor.nbytes for tensor in tensors)
    # Zeros cost nothing until they are used; a row uses all of its recurrent layers' states, however short it is.
    filled = sum(tensor.nbytes for tensor in tensors if tensor.fill or tensor.name in spec.recurrent)
    if spec.device == "cpu" and filled > (available := available_memory()):
        raise _too_large(needed, f"{available / GIGABYTE:.2f} available")
    try:
        return runner.open_session(directory, manifest, gpu, progress)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or NO_MEMORY.search(str(error)):
            raise _too_large(needed, one_line(error)) from None
        raise EngineError(
            f"engine: expected a program that loads, got {one_line(error)}; copy it again or {REBUILD}"
        ) from None


def _too_large(needed: int, got: str) -> EngineError:
    return EngineError(
        f"memory: expected {needed / GIGABYTE:.2f} GB for state and caches, got {got}; free some, or {REBUILD} and a "
        "smaller --max-batch or --max-seq-len"
    )


def _runner(manifest: Manifest) -> ModuleType:
    """The module that runs an engine, imported when an engine needs it. Raises EngineError."""
    name = manifest.spec.config.get("backend")
    if name not in BACKENDS:
        raise EngineError(f"engine: backend: expected one of {', '.join(BACKENDS)}, got {name!r}; {REBUILD}")
    return BACKENDS[name].load_runner()
