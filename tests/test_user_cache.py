"""Where kept files lie."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest
from specstep import user_cache
from specstep.user_cache import cache_path, keep, locked


def test_xdg_then_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_path("steps", "x.json") == tmp_path / "cache" / "specstep" / "steps" / "x.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_path("steps") == tmp_path / ".cache" / "specstep" / "steps"


def test_without_a_home_files_live_as_long_as_the_process(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    path = cache_path("steps", "x.json")
    keep(path, b"times")
    assert cache_path("steps", "x.json").read_bytes() == b"times" and path.stat().st_uid >= 0
    user_cache._temporary().cleanup()
    user_cache._temporary.cache_clear()
    with pytest.raises(FileNotFoundError):
        path.read_bytes()


def test_what_a_killed_writer_left_is_removed_and_what_one_writes_is_not(tmp_path):
    path, left, held = tmp_path / "table", tmp_path / ".table.4000000.7", tmp_path / ".table.4000001.7"
    left.write_bytes(b"half")
    with held.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        keep(path, b"whole")
        assert path.read_bytes() == b"whole"
        assert sorted(tmp_path.iterdir()) == [held, path]


ASKS = """
import fcntl, sys
try:
    fcntl.flock(open(sys.argv[1], "wb"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(7)
"""


def test_another_process_waits_for_a_lock(tmp_path):
    def asks():
        return subprocess.run([sys.executable, "-c", ASKS, str(tmp_path / "new" / "lock")], check=False).returncode

    with locked(tmp_path / "new" / "lock"):
        assert asks() == 7
    assert asks() == 0


def test_nobody_waits_where_no_file_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    with locked(tmp_path / "file" / "lock"):
        pass
