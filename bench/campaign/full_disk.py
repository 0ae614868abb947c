"""Fills the disk at each write: files may grow to so many bytes and no more, or a small disk has so many left."""

import contextlib
import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from .kills import Writes


def sizes(largest: int, steps: int) -> Iterator[int]:
    """Limits at which writes fail, from the first byte to the last but one."""
    yield from sorted({0, 1, largest - 1, *(largest * step // steps for step in range(1, steps))})


def write_limited(task: Writes, place: Path, limit: int) -> str:
    """Have a process write with files of `limit` bytes at most -> what is wrong then, empty for nothing. The system
    refuses the byte after the last as a full disk does, with another number."""

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return _write(task, place, limited)


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[Path]:
    """A file system of so many bytes. Raises OSError where this user may not mount one."""
    with tempfile.TemporaryDirectory(prefix="full-disk-") as folder:
        mount = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True, text=True
        )
        if mount.returncode:
            raise OSError(mount.stderr.strip())
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)  # lazily: what was read may still be mapped


def write_on_full(task: Writes, place: Path, left: int) -> str:
    """Have a process write where so many bytes of the disk are left -> what is wrong then, empty for nothing."""
    disk = place.parent
    filler, blocks = disk.parent / "filler", os.statvfs(disk)
    with filler.open("wb") as file:
        if (size := blocks.f_bavail * blocks.f_frsize - left) > 0:
            os.posix_fallocate(file.fileno(), 0, size)
    try:
        return _write(task, place, lambda: None)
    finally:
        filler.unlink()


def _write(task: Writes, place: Path, begin: Callable[[], None]) -> str:
    from specstep.errors import SpecstepError

    before = task.read(place)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        begin()
        said = "no error"
        try:
            task.write(place, before + 1)
        except SpecstepError as error:
            said = "" if str(error).isprintable() else f"more than a line: {error}"
        except BaseException as error:  # the campaign's question
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        said = file.read().decode()
    _, status = os.waitpid(child, 0)
    if status:
        return f"ended with status {status}"
    found = task.read(place)
    if said == "no error" and found == before + 1:
        return ""  # it fitted
    if found != before:
        return f"expected version {before}, got {found}; {said}"
    left = task.litter(place)
    return said or (f"litter: {' '.join(left)}" if left else "")
