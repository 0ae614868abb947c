"""Functions in forked processes: what they return, report and raise reaches whoever waits."""

import os

import pytest
import specstep
from specstep.compile.inductor.forked import run_forked


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
