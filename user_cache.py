"""What a machine keeps from process to process: files under `$XDG_CACHE_HOME/specstep`, or `~/.cache/specstep`."""

import os
from pathlib import Path


def cache_path(*names: str) -> Path:
    """Where a kept file lies, if there is one."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").joinpath("specstep", *names)


def keep(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_suffix(f".{os.getpid()}")
    work.write_bytes(data)
    work.replace(path)
