"""What a machine keeps from process to process: files under `$XDG_CACHE_HOME/specstep`, or `~/.cache/specstep`."""

import os
import threading
from pathlib import Path


def cache_path(*names: str) -> Path:
    """Where a kept file lies, if there is one."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").joinpath("specstep", *names)


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
