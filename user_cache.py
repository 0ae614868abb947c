"""What a machine keeps from process to process: files under `$XDG_CACHE_HOME/specstep`, or `~/.cache/specstep`."""

import contextlib
import fcntl
import functools
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PROGRAMS = "programs"  # the folder of compiled code


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
    """Write a file, whole or not at all, and remove what killed writers of it have left. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(path)
    work, file = _locked_file(path)
    with file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(work, path)
        except OSError:
            work.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Within it, other processes that want the lock of this name wait. Where no file can be written or locked, nobody
    does."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(path.open("wb"))
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:  # who waits for this file no longer waits for whoever comes later: nothing is lost by that
            with contextlib.suppress(OSError):
                path.unlink()


def _locked_file(path: Path) -> tuple[Path, BinaryIO]:
    """A new file beside `path`, locked: the system releases the lock when a process ends, however it ends."""
    while True:
        work = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        file = work.open("wb")
        with contextlib.suppress(OSError):  # a disk without locks: nobody will remove it either
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if work.exists():  # else another writer took it for a leftover before it was locked
            return work, file
        file.close()


def _remove_left(path: Path) -> None:
    """Remove the work files of `path` that nobody has locked any more."""
    pattern = re.compile(re.escape(f".{path.name}.") + r"\d+\.\d+")
    for left in path.parent.iterdir():
        if pattern.fullmatch(left.name):
            with contextlib.suppress(OSError), left.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
