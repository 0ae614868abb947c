"""What a machine keeps from process to process: files under `$XDG_CACHE_HOME/specstep`, or `~/.cache/specstep`."""

import functools
import os
import tempfile
import threading
from pathlib import Path


def cache_path(*names: str) -> Path:
    """Where a kept file lies, if there is one. A user without a home keeps files as long as the process lives."""
    folder = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(folder or Path.home() / ".cache").joinpath("specstep", *names)
    except RuntimeError:
        return Path(_temporary().name, *names)


@functools.cache
def _temporary() -> "tempfile.TemporaryDirectory[str]":
    """A folder that is removed at the end of the process."""
    return tempfile.TemporaryDirectory(prefix="specstep-", ignore_cleanup_errors=True)


def keep(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with work.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(work, path)
    except OSError:
        work.unlink(missing_ok=True)
        raise
