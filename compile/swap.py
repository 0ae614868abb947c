"""Replace a directory by a new one: whoever looks finds the old one or the new one, also after a crash.

Linux swaps two names in one step. Where the file system cannot (some network file systems), there are two renames: a
crash between them leaves no directory under the name, and the next build puts the old one back.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of linux/fs.h
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def work_folder(place: Path) -> Iterator[Path]:
    """A fresh, locked folder beside `place`, removed when the block ends. Raises OSError.

    What killed builds of the same place have left is removed first. Their folders are known by the lock that nobody
    holds any more: the system releases it when a process ends, however it ends.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    recover(place)
    work, lock = _locked_folder(place)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(lock)


def recover(place: Path) -> None:
    """Undo what killed builds left: remove their work folders, and put back what was set aside. Raises OSError."""
    pattern, running = re.compile(re.escape(_prefix(place)) + r"\w{8}"), False
    for path in place.parent.iterdir():
        if pattern.fullmatch(path.name):
            try:
                lock = _lock(path)
            except OSError as error:  # held by a running build, or removed by one, or on a disk without locks
                running |= error.errno != errno.ENOENT
                continue
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
    aside = _aside(place)
    if running or not aside.exists():  # what a running build has set aside is its own
        return
    if place.exists():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        os.rename(aside, place)


def replace(work: Path, place: Path) -> None:
    """Put `work` where `place` is or may be; `work` then holds what was there, or is gone. Raises OSError.

    All of `work` is on the disk before anything is renamed.
    """
    _sync(work)
    if not place.exists():
        os.rename(work, place)
    else:
        try:
            exchange(work, place)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            _replace_in_two(work, place)
    _sync_folder(place.parent)


def exchange(one: Path, other: Path) -> None:
    """Swap two names in one step. Raises OSError, with an errno of UNSUPPORTED where the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(other))


def _replace_in_two(work: Path, place: Path) -> None:
    """Where names cannot be swapped: set the old one aside, put it back if the new one does not get there."""
    aside = _aside(place)
    os.rename(place, aside)
    try:
        os.rename(work, place)
    except BaseException:
        os.rename(aside, place)
        raise
    with contextlib.suppress(OSError):  # the new one is in place
        os.rename(aside, work)


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            _sync(path)
        else:
            sync_file(path)
    _sync_folder(folder)


def sync_file(path: Path) -> None:
    """Have a file's bytes, or a folder's names, on the disk. Raises OSError."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _sync_folder(path: Path) -> None:
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in UNSUPPORTED:  # some file systems do that by themselves
            raise


def _locked_folder(place: Path) -> tuple[Path, int]:
    """Make a folder and lock it. Another build may take it for a leftover before it is locked: then make another."""
    while True:
        work = place.with_name(_prefix(place) + secrets.token_hex(4))
        try:
            work.mkdir()  # with the mode that the umask says, which `tempfile` does not
            lock = _lock(work)
        except OSError as error:
            if error.errno in UNSUPPORTED:  # no locks here: nobody will remove it either
                return work, os.open(work, os.O_RDONLY)
            if error.errno not in (errno.EEXIST, errno.ENOENT, errno.EWOULDBLOCK):
                raise
            continue
        if work.exists():
            return work, lock
        os.close(lock)


def _lock(folder: Path) -> int:
    """Lock a folder -> the descriptor that holds the lock. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _prefix(place: Path) -> str:
    return f".{place.name}.specstep-"


def place_of(work: Path) -> Path | None:
    """What a work folder, or what was set aside, belongs to, by its name; None for other names."""
    name, found, _ = work.name.rpartition(".specstep-")
    return work.with_name(name[1:]) if found and name.startswith(".") else None


def _aside(place: Path) -> Path:
    return place.with_name(_prefix(place) + "old")
