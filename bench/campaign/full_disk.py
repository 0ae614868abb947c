"""Fills the disk at each write: files may grow to so many bytes and no more, for one size after the other."""

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

from .kills import Writes


def sizes(largest: int, steps: int) -> Iterator[int]:
    """Limits at which writes fail, from the first byte to the last but one."""
    yield from sorted({0, 1, largest - 1, *(largest * step // steps for step in range(1, steps))})


def write_limited(task: Writes, place: Path, limit: int) -> str:
    """Have a process write with files of `limit` bytes at most -> what is wrong then, empty for nothing. The system
    refuses the byte after the last as a full disk does, with another number."""
    from specstep.errors import SpecstepError

    before = task.read(place)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
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
