"""OpenMP's libraries are found wherever they lie."""

import ctypes
from pathlib import Path

from specstep.runtime.inductor import openmp

MAPS = """\
7f0000000000-7f0000001000 r-xp 00000000 08:01 42                         /home/a user/.venv/lib/libgomp-1.so.1
7f0000002000-7f0000003000 r--p 00000000 08:01 42                         /home/a user/.venv/lib/libgomp-1.so.1
7f0000004000-7f0000005000 r-xp 00000000 08:01 43                         /lib/libgomp.so.1 (deleted)
7f0000006000-7f0000007000 rw-p 00000000 00:00 0
7ffd00000000-7ffd00001000 rw-p 00000000 00:00 0                          [stack]
"""


def test_paths_with_spaces_and_files_that_were_replaced(monkeypatch):
    asked = []

    class Library:
        omp_pause_resource_all = None

        def __init__(self, path):
            asked.append(path)
            if path.endswith("(deleted)"):
                raise OSError(path)

    monkeypatch.setattr(Path, "read_text", lambda self: MAPS)
    monkeypatch.setattr(ctypes, "CDLL", Library)
    openmp._libraries.cache_clear()
    try:
        assert len(openmp._libraries()) == 1
        assert sorted(asked) == ["/home/a user/.venv/lib/libgomp-1.so.1", "/lib/libgomp.so.1 (deleted)"]
    finally:
        openmp._libraries.cache_clear()
