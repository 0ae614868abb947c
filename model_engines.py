"""Engines by the name of their model: what is missing is built once, into the user's cache.

Where an engine is there, nothing of the compiler is imported. A build runs in a process of its own, which takes its
memory and its threads along when it ends.
"""

import fcntl
import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import BuildError, EngineError, InputError, needs_extra
from .kept_engines import FOLDER, make_room
from .progress import OnProgress, silent
from .runtime.engine_file import MANIFEST, check_files, read_manifest
from .runtime.gpu import gpu_number
from .user_cache import cache_path

if TYPE_CHECKING:
    from .compile.config import BuildOptions
    from .runtime.engine import Engine

OURS = re.compile(r"specstep: (?:[\d:]+ )?")  # before what `specstep build` says
BUILD = "from specstep.cli import main; raise SystemExit(main())"


def load(
    model: str | Path,
    deep_check: bool = False,
    *,
    build: "BuildOptions | None" = None,
    prefix_cache_bytes: int = 0,
    prefill_per_step: int | None = None,
    learning: bool = True,
    learned: str | Path | None = None,
    nodes: int | str = "auto",
    device: str | None = None,
    kv_events: bool = False,
    progress: OnProgress = silent,
) -> "Engine":
    """Load an engine: the directory of one, or a model, whose engine is built on first use.

    Args:
        model: what `build` wrote, or what it takes: a Hugging Face directory, a .gguf file, a hub id, "smollm2-135m".
        build: options of `build` for a model, as {"max_batch": 4}; a drafter by its name.
        progress: called with one line per stage, too, while an engine is built.
        deep_check, prefix_cache_bytes, prefill_per_step, learning, learned, nodes, device, kv_events: see
            `runtime.load.load`.

    Returns:
        The engine, ready to generate.

    Raises:
        BuildError: no engine can be built from the model with these options.
        InputError: an option is unusable.
        EngineError: the engine cannot run here.
    """
    directory = engine_of(model, progress, build, device=device)
    with _uncollected():
        with needs_extra("", "specstep.load"):
            from .runtime.load import load as load_directory  # and with it torch

        return load_directory(
            directory,
            deep_check,
            prefix_cache_bytes=prefix_cache_bytes,
            prefill_per_step=prefill_per_step,
            learning=learning,
            learned=learned,
            nodes=nodes,
            device=device,
            kv_events=kv_events,
            progress=progress,
        )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Within it, Python looks for no garbage: imports make it look through all of PyTorch's objects, which takes longer
    than to open an engine's programs."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def engine_of(
    model: str | Path,
    progress: OnProgress = silent,
    given: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    device: str | None = None,
) -> Path:
    """The engine directory of a model, built unless it is there; an engine directory itself. given, defaults: options
    of `build`, asked for and otherwise. device: what the engine will run on, as of `load`. Raises BuildError,
    and InputError for options that come too late for an engine."""
    gpu_number(device)  # what is no device is said before a build
    asked = {name: value for name, value in (given or {}).items() if value is not None}
    if _is_engine(model):
        if asked:
            raise InputError(
                f"{', '.join(asked)}: expected none with an engine directory, whose build chose it, got one; give the "
                f"model, or build {model} again"
            )
        return Path(model).expanduser()
    from .compile.engine_key import engine_key  # here, since an engine directory needs nothing of the compiler

    name, options = str(model), {**(defaults or {}), **({"device": "cuda"} if device else {}), **asked}
    directory = cache_path(FOLDER, f"{_readable(name)}-{engine_key(name, options)}")
    if not _is_whole(directory):
        with _locked(directory, progress):
            if not _is_whole(directory):
                progress(f"{name}: builds its engine, once, into {directory}")
                _build(name, directory, options, progress)
                make_room(directory, progress)
    with suppress(OSError):  # of another user, or on a disk that is read only
        os.utime(directory)
    return directory


def _is_engine(model: str | Path) -> bool:
    """Whether it is for the runtime: an engine, or a directory that no model is, which the runtime refuses. Raises
    InputError for what is not there among engines, and would be taken for a hub id."""
    try:
        path = Path(model).expanduser()
        if (path / MANIFEST).is_file():
            return True
        if not path.exists() and path.parent != Path() and [*path.parent.glob(f"*/{MANIFEST}")]:
            raise InputError(f"engine: expected one that is there, got {model}; there are others in {path.parent}")
        there = path.is_dir()
    except (OSError, RuntimeError) as error:  # a name that is too long, a folder that cannot be read, no such user
        raise InputError(
            "model: expected an engine directory, a model directory, a .gguf file, a hub id or smollm2-135m, got "
            f"{str(model)[:200]!r} ({error})"
        ) from None
    from .compile.locate import locate  # here, since an engine directory needs nothing of the compiler

    try:
        locate(str(model))
    except BuildError as error:
        if there:
            return True
        raise BuildError(f"{error}; an engine directory is taken, too") from None
    return False


def _is_whole(directory: Path) -> bool:
    """Whether a kept engine is there, and no file of it is damaged or missing."""
    try:
        check_files(directory, read_manifest(directory), deep=False)
    except (EngineError, OSError):
        return False
    return True


def _readable(name: str) -> str:
    """A model's name, safe in a path."""
    return re.sub(r"[^\w.-]", "-", Path(name).name.removesuffix(".gguf")).lstrip(".-")[:60] or "model"


@contextmanager
def _locked(directory: Path, progress: OnProgress) -> Iterator[None]:
    """One process at a time builds an engine; the others wait for it. Raises BuildError."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory.with_name(f".{directory.name}.lock"), os.O_CREAT | os.O_RDWR, 0o666)
    except OSError as error:
        raise BuildError(
            f"cache: expected a folder to write engines to, got {directory.parent} ({error.strerror}); set "
            "XDG_CACHE_HOME, or build an engine directory with `specstep build`"
        ) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that builds {directory.name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a disk without locks: two may build, and one replaces the other's
            pass
        yield
    finally:
        os.close(lock)


def _build(name: str, directory: Path, options: Mapping[str, Any], progress: OnProgress) -> None:
    """`specstep build` in a process of its own. Raises BuildError with what it said last."""
    words = _words(options)
    with needs_extra("build", "build"):
        from .compile.config import make_config
    make_config(options)
    command = [sys.executable, "-P", "-c", BUILD, "build", "-o", str(directory), *words, "--", name]
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)  # what this process imports from
    said = []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {"PYTHONPATH": paths},
    ) as building:
        assert building.stderr is not None
        try:
            for line in building.stderr:
                said.append(line.rstrip())
                progress(OURS.sub("", said[-1], count=1))
        except BaseException:  # an interrupt, most likely
            building.terminate()
            raise
    if building.returncode < 0:
        raise BuildError(f"build: {name}: ended by signal {-building.returncode}; is there enough memory for it?")
    if building.returncode:
        ours = [line for line in said if line.startswith("specstep: ")] or said or ["it said nothing"]
        raise BuildError(OURS.sub("", ours[-1], count=1))


def _words(options: Mapping[str, Any]) -> list[str]:
    """Options of `build` on the command line. Raises InputError for a drafter that is no name."""
    words: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool):
            words += [] if value else [f"--no-{name}"]
        elif isinstance(value, str | int | Path):
            words.append(f"--{name.replace('_', '-')}={value}")
        elif isinstance(value, list | tuple):
            words += [f"--{name.replace('_', '-')}", *map(str, value)]
        else:
            raise InputError(f"{name}: expected a name, got {type(value).__name__}; `specstep.build` takes objects")
    return words
