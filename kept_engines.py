"""The engines in the user's cache: a list, the last used first, and a bound on what they take."""

import datetime
import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .errors import InputError
from .progress import OnProgress
from .runtime.engine_file import MANIFEST
from .user_cache import cache_path

FOLDER = "engines"
MOST_BYTES = 64 * 2**30  # of all that are kept; those that were not used for longest go first
MIB = 2**20


class KeptEngine(NamedTuple):
    """An engine in the user's cache. size: in bytes. used: when it was last asked for, in seconds since 1970."""

    directory: Path
    size: int
    used: float

    @property
    def said_use(self) -> str:
        """When it was last asked for, for people."""
        return datetime.datetime.fromtimestamp(self.used).strftime("%Y-%m-%d %H:%M")


def kept_engines() -> list[KeptEngine]:
    """All in the user's cache, the last used first."""
    kept = []
    for manifest in cache_path(FOLDER).glob(f"[!.]*/{MANIFEST}"):
        with suppress(OSError):  # removed meanwhile
            size = sum(file.stat().st_size for file in manifest.parent.rglob("*") if file.is_file())
            kept.append(KeptEngine(manifest.parent, size, manifest.parent.stat().st_mtime))
    return sorted(kept, key=lambda engine: engine.used, reverse=True)


def make_room(new: Path, progress: OnProgress) -> None:
    """Remove engines until the others and a new one take at most MOST_BYTES. What cannot be removed stays."""
    kept = sorted(kept_engines(), key=lambda engine: engine.directory != new)
    total = 0
    for engine in kept:
        total += engine.size
        if total > MOST_BYTES and engine.directory != new:
            with suppress(InputError):
                remove_engine(engine.directory)
                progress(
                    f"removed {engine.directory.name}, {engine.size / MIB:,.0f} MiB, last used {engine.said_use}: kept "
                    f"engines take at most {MOST_BYTES / MIB:,.0f} MiB"
                )


def remove_engine(directory: Path) -> None:
    """Remove an engine; whoever has loaded it goes on with it. Raises InputError."""
    try:
        (directory / MANIFEST).unlink()  # half of it is no engine
        shutil.rmtree(directory)
    except OSError as error:
        raise InputError(f"remove: {directory}: {error.strerror}") from None
