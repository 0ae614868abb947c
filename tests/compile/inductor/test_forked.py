"""Functions in forked processes: what they return, report and raise reaches whoever waits."""

import multiprocessing
import os
import time

import pytest
import specstep
from specstep.compile.inductor.forked import run_at_once, run_forked


def test_a_result_and_the_lines_before_it():
    said = []

    def function(progress):
        progress("first")
        progress("second")
        return os.getpid()

    assert run_forked("engine", function, said.append) != os.getpid()
    assert said == ["first", "second"]


def refuse(progress):
    raise specstep.BuildError("drafter: expected another")


def fail(progress):
    raise KeyError("lost\nand more")


def fill_disk(progress):
    raise OSError("write: No space left on device")


def die(progress):
    os._exit(1)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (refuse, "^drafter: expected another$"),
        (fail, "^compile: engine: KeyError: .*lost"),
        (fill_disk, "^compile: engine: no space left on the device$"),
        (die, "^compile: engine: the compiling process died; is there enough memory?"),
    ],
)
def test_what_goes_wrong_is_a_build_error(function, message):
    with pytest.raises(specstep.BuildError, match=message):
        run_forked("engine", function, print)


def test_functions_run_at_once_but_no_more_than_there_are_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5})

    def note(name):
        def function(progress):
            (tmp_path / f"{name} runs").touch()
            most = len(list(tmp_path.glob("* runs")))
            time.sleep(0.2)
            most = max(most, len(list(tmp_path.glob("* runs"))))
            (tmp_path / f"{name} runs").unlink()
            (tmp_path / f"{name} saw {most}").touch()

        return function

    run_at_once({name: note(name) for name in "abcde"})
    saw = sorted(path.name for path in tmp_path.iterdir())
    assert [name[0] for name in saw] == list("abcde") and max(int(name[-1]) for name in saw) == 2


def test_the_first_that_fails_ends_the_others(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5})

    def last(progress):
        time.sleep(60)
        (tmp_path / "ran").touch()

    with pytest.raises(specstep.BuildError, match=r"^drafter: expected another$"):
        run_at_once({"first": last, "second": refuse, "third": last})
    for child in multiprocessing.active_children():
        child.join(20)
    assert not multiprocessing.active_children() and not list(tmp_path.iterdir())


def test_nothing_runs_where_there_is_nothing():
    run_at_once({})
