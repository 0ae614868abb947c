"""An engine directory is replaced whole: the old one or the new one is there, whatever happens in between."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import specstep
from specstep.compile import swap
from specstep.compile.writer import engine_directory
from specstep.runtime.engine_file import MANIFEST, check_files, read_manifest

CALLS = ("open", "close", "fsync", "rename")
HOLD = """
import sys, time
from pathlib import Path
from specstep.compile.writer import engine_directory
with engine_directory(Path(sys.argv[1])) as work:
    (work / "step.pt2").write_bytes(b"half a program")
    print(work, flush=True)
    time.sleep(600)
"""


class Stopped(BaseException):
    """The system call at which the machine stops."""


def stop_at(monkeypatch, count):
    """Let the system calls of a swap pass until one is left, which fails. Returns how many have come."""
    seen = []

    def wrap(owner, name):
        real = getattr(owner, name)

        def call(*arguments):
            seen.append(name)
            if len(seen) == count:
                raise Stopped(name)
            return real(*arguments)

        monkeypatch.setattr(owner, name, call)

    for name in CALLS:
        wrap(swap.os, name)
    wrap(swap, "exchange")
    return seen


@pytest.fixture
def engines(engine_folder, tmp_path):
    """An engine in place and another one's files, told apart by a word in the manifest."""

    def make(name):
        folder = shutil.copytree(engine_folder, tmp_path / name)
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest["about"]["word"] = name
        (folder / MANIFEST).write_text(json.dumps(manifest))
        return folder

    return make("old"), make("new")


def word(folder):
    """What the manifest says of a whole engine. Raises EngineError for less than one."""
    manifest = read_manifest(folder)
    check_files(folder, manifest, deep=True)
    return manifest.about["word"]


def rebuild(place, files):
    with engine_directory(place) as work:
        shutil.copytree(files, work, dirs_exist_ok=True)


def unsupported(*_):
    raise OSError(errno.EINVAL, "Invalid argument")


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two renames"])
def test_a_stop_at_any_system_call_leaves_an_engine(exchanges, engines, monkeypatch):
    place, files = engines
    if not exchanges:
        monkeypatch.setattr(swap, "exchange", unsupported)
    found, count, stopped = set(), 0, True
    while stopped:
        count += 1
        stopped = False
        with swap.work_folder(place) as work:
            shutil.copytree(files, work, dirs_exist_ok=True)
            with monkeypatch.context() as patch:
                stop_at(patch, count)
                try:
                    swap.replace(work, place)
                except Stopped:
                    stopped = True
        found.add(word(place))
    assert count > 20 and found == {"old", "new"}
    assert word(place) == "new"
    specstep.load(place)


def test_a_kill_between_two_renames_is_mended_by_the_next_build(engines):
    place, files = engines
    os.rename(place, swap._aside(place))  # what a kill at that moment leaves
    with pytest.raises(RuntimeError, match="a defect"), engine_directory(place):  # a build that fails mends it, too
        assert word(place) == "old"
        raise RuntimeError("a defect")
    assert word(place) == "old"
    rebuild(place, files)
    assert word(place) == "new" and not swap._aside(place).exists()


def test_what_a_running_build_has_set_aside_is_left_to_it(engines):
    place, _ = engines
    with swap.work_folder(place):  # between its two renames
        os.rename(place, swap._aside(place))
        swap.recover(place)  # of a second build
        assert swap._aside(place).exists() and not place.exists()
        os.rename(swap._aside(place), place)


def test_a_load_while_the_engine_is_replaced_is_of_one_engine(engines, monkeypatch):
    """Files are opened one after the other: those of two engines must not be mixed."""
    from specstep.runtime.inductor import aoti

    place, files = engines
    opened, real = [], aoti.open_weights

    def replaced(path, spec):
        opened.append(word(path.parent))
        weights = real(path, spec)
        if len(opened) == 1:
            rebuild(place, files)
        return weights

    monkeypatch.setattr(aoti, "open_weights", replaced)
    assert len(specstep.load(place).generate([5, 6], 4).token_ids) == 4
    assert opened == ["old", "new"]


def test_names_are_exchanged_here(tmp_path):
    """What the tests of the exchange rest on: this file system can."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir(), other.mkdir()
    (one / "mine").touch()
    try:
        swap.exchange(one, other)
    except OSError as error:
        assert error.errno in swap.UNSUPPORTED
        pytest.skip("the file system cannot exchange names")
    assert (other / "mine").exists() and not (one / "mine").exists()


def test_all_is_on_the_disk_before_it_takes_its_place(engines, monkeypatch):
    place, files = engines
    with swap.work_folder(place) as work:
        shutil.copytree(files, work, dirs_exist_ok=True)
        with monkeypatch.context() as patch:
            seen = stop_at(patch, None)
            swap.replace(work, place)
    synced = seen[: seen.index("exchange")].count("fsync")
    assert synced == len(list(files.iterdir())) + 1 and seen[-2:] == ["fsync", "close"]


def test_a_loaded_engine_goes_on_while_it_is_rebuilt(engines):
    place, files = engines
    engine = specstep.load(place)
    expected = specstep.load(files).generate([5, 6, 7, 5, 6], 60, ignore_eos=True).token_ids
    pieces = engine.stream([5, 6, 7, 5, 6], 60, ignore_eos=True)
    next(pieces)
    rebuild(place, files)
    for weights in files.glob("weights*"):
        weights.write_bytes(bytes(weights.stat().st_size))  # what it runs on is not what lies there
    list(pieces)
    assert engine.generate([5, 6, 7, 5, 6], 60, ignore_eos=True).token_ids == expected
    assert word(place) == "new"


def test_a_link_stays_a_link(engines, tmp_path):
    place, files = engines
    link = tmp_path / "current"
    link.symlink_to(place)
    rebuild(link, files)
    assert link.is_symlink() and word(link) == word(place) == "new"


def hold(place: Path) -> tuple[subprocess.Popen[str], Path]:
    """A build of another process that is in the middle, and its work folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, place], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_leftovers_of_a_killed_build_are_removed_and_a_running_one_is_left_alone(engines):
    place, files = engines
    (place.parent / f".{place.name}.specstep-notes").mkdir()  # a user's own, however like one of ours
    killed, leftover = hold(place)
    running, busy = hold(place)
    try:
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert leftover.exists() and busy.exists() and word(place) == "old"
        rebuild(place, files)
        assert not leftover.exists() and (busy / "step.pt2").exists() and word(place) == "new"
    finally:
        running.kill()
        running.wait()
    rebuild(place, files)
    kept = {place.name, files.name, f".{place.name}.specstep-notes"}
    assert {path.name for path in place.parent.iterdir()} == kept
