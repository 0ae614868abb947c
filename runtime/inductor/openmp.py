"""OpenMP's threads, of which every calling thread keeps its own."""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOFT = 1  # of omp_pause_resource_t: settings stay


def release_threads() -> None:
    """End the idle OpenMP threads of the calling thread; its next parallel region starts new ones.

    libgomp counts the threads of all callers. Where there are more than cores it lets none of them spin at a barrier,
    and a step, which has hundreds of barriers, takes twice as long.
    """
    for library in _libraries():
        library.omp_pause_resource_all(SOFT)


@contextlib.contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Have the calling thread work with so many threads, itself among them."""
    before = [library.omp_get_max_threads() for library in _libraries()]
    for library in _libraries():
        library.omp_set_num_threads(count)
    try:
        yield
    finally:
        for library, threads in zip(_libraries(), before, strict=True):
            library.omp_set_num_threads(threads)


def one_thread() -> contextlib.AbstractContextManager[None]:
    """Have the calling thread work alone. Where it has no helpers yet, starting them takes milliseconds, more than
    filling a row does."""
    return on_threads(1)


@functools.cache
def _libraries() -> list[Any]:
    """Every libgomp that is loaded and can do it (OpenMP 5.0)."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.is_file() else []
    paths = {line.split(maxsplit=5)[5] for line in lines if "libgomp" in line}  # which may have spaces
    libraries = []
    for path in sorted(paths):
        with contextlib.suppress(OSError):  # a file that was replaced meanwhile is "PATH (deleted)"
            libraries.append(ctypes.CDLL(path))
    return [library for library in libraries if hasattr(library, "omp_pause_resource_all")]
