"""`make gpu-check` without a GPU: parts that fail, that take too long, that skip; what is written, and when."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import gpu_check  # noqa: E402
from gpu_check import PARTS, Part, main, parse, run_limited, run_tests  # noqa: E402

TESTS = """
import pytest, time
def test_good(record_property): record_property("flips", [{"gap": 0.1}])
def test_bad(): assert 1 == 2
def test_skipped(): pytest.skip("no library")
def test_slow(): time.sleep(60)
@pytest.fixture
def broken(): raise ValueError("no fixture")
def test_without_setup(broken): pass
"""


@pytest.fixture(autouse=True)
def few_plugins(monkeypatch):
    """All that are installed take three seconds of each run to load."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")


@pytest.fixture
def tests(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    return [str(tmp_path), "-p", "no:cacheprovider", "-k"]


def test_a_part_says_what_failed_and_why_what_was_noted_and_skipped(tests):
    part = run_tests([*tests, "not slow"], 100, jobs=2)
    assert part["passed"] == 1 and part["skipped"] == {"Skipped: no library": 1}
    failed = {name.partition("::")[2]: said for name, said in part["failed"].items()}
    assert failed == {"test_bad": "assert 1 == 2", "test_without_setup": "ValueError: no fixture"}
    assert list(part["noted"].values()) == [{"flips": [{"gap": 0.1}]}]
    assert len(part["slowest"]) == 4 and part["seconds"] > 0
    assert "1 passed, 1 skipped, 2 failed" in gpu_check.summary(part)
    assert "1 answers part from the plain ones, at gaps of 0.1 at most" in gpu_check.summary(part)


def test_a_part_that_takes_too_long_keeps_what_it_did(tests):
    part = run_tests([*tests, "good or slow"], 8, jobs=1)
    assert part["passed"] == 1 and part["failed"] == {"pytest": "ended with more than 8 s"}


def test_nothing_to_run_is_a_failure_and_so_is_a_file_that_does_not_import(tests, tmp_path):
    assert run_tests([*tests, "absent"], 100)["failed"] == {"pytest": "ended with 5"}
    (tmp_path / "test_some.py").write_text("import nonsense_of_nobody\n")
    [said] = run_tests([str(tmp_path), "-p", "no:cacheprovider"], 100)["failed"].values()
    assert "nonsense_of_nobody" in said


def test_what_takes_too_long_is_killed_with_all_that_it_started(tmp_path):
    note = tmp_path / "pid"
    child = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert run_limited([sys.executable, "-c", script], 4) == "more than 4 s"
    pid = int(note.read_text())
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} runs on")


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine with a GPU, whose parts are these."""

    def of(parts):
        monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(gpu_check, "machine", lambda device: {"device": device})
        monkeypatch.setattr(gpu_check, "PARTS", parts)
        monkeypatch.setattr(gpu_check, "BENCH", tmp_path)
        return ["--out", str(tmp_path / "out"), "--parts", *parts]

    return of


def test_a_part_that_fails_stops_no_other_and_all_are_written(gpu, tmp_path, capsys):
    place = "Path(sys.argv[sys.argv.index('--out') + 1])"
    good = f"""import sys; from pathlib import Path; {place}.write_text('{{"cells": [{{}}, {{}}]}}')"""
    (tmp_path / "good.py").write_text(good)
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    (tmp_path / "slow.py").write_text(f"{good}\nimport time; time.sleep(60)")
    (tmp_path / "mute.py").write_text("import time; time.sleep(60)")
    parts = {"a": Part(60, script=("bad.py",)), "b b": Part(60, script=("good.py",))}
    assert main(gpu(parts)) == 1
    written = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert written["device"] == "cuda" and list(written["parts"]) == ["a", "b b"]
    assert written["parts"]["a"]["failed"] == {"bad.py": "ended with 3"}
    assert written["parts"]["b b"]["file"] == "gpu_b_b.json" and not written["parts"]["b b"]["failed"]
    assert "a: 0 figures, 1 failed" in capsys.readouterr().out
    assert main(gpu({"b b": parts["b b"]})) == 0
    assert main(gpu({"c": Part(3, script=("slow.py",))})) == 0
    written = json.loads((tmp_path / "out" / "gpu_check.json").read_text())["parts"]["c"]
    assert (written["figures"], written["ended"]) == (2, "more than 3 s")
    assert main(gpu({"c": Part(3, script=("mute.py",))})) == 1


def test_what_a_part_does_not_use_is_left_to_the_next(gpu, monkeypatch):
    limits, clock = [], [100.0]

    def run_bench(name, part, seconds, out, kept):
        limits.append(round(seconds))
        clock[0] += 10
        return {"figures": 1, "failed": {}, "seconds": 10}

    arguments = gpu({"a": Part(30, script=("a",)), "b": Part(20, script=("b",)), "c": Part(5, script=("c",))})
    monkeypatch.setattr(gpu_check, "run_bench", run_bench)
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: clock[0])
    assert main(arguments) == 0
    assert limits == [30, 40, 35]


def test_engines_are_built_beside_the_tests_and_ready_for_what_is_timed(gpu, monkeypatch, tmp_path, tests):
    begin = (
        "import sys, time; from pathlib import Path; engine = Path(sys.argv[sys.argv.index('--keep') + 1], 'engine')"
    )
    (tmp_path / "build.py").write_text(f"{begin}; time.sleep(1); engine.write_text('x')")
    cells = "'{\"cells\": [{}]}' if engine.is_file() else '{}'"
    (tmp_path / "timed.py").write_text(f"{begin}; Path(sys.argv[sys.argv.index('--out') + 1]).write_text({cells})")
    monkeypatch.setattr(gpu_check, "BUILD", ("build.py", "--keep", gpu_check.KEPT))
    parts = {"tests": Part(60, (*tests, "good")), "timed": Part(60, script=("timed.py", "--keep", gpu_check.KEPT))}
    assert main(["--jobs", "1", *gpu(parts)]) == 0
    written = json.loads((tmp_path / "out" / "gpu_check.json").read_text())["parts"]
    assert written["tests"]["passed"] == 1 and written["timed"]["figures"] == 1


def test_the_parts_take_eight_minutes_in_all_and_name_what_is_there():
    *_, last = PARTS
    assert sum(part.seconds for name, part in PARTS.items() if name != last) == 470
    assert last == "ranks"  # which skips itself where there is one GPU
    assert all((BENCH / part.script[0]).is_file() for part in PARTS.values() if part.script)
    assert all((BENCH.parent / part.tests[0]).exists() for part in PARTS.values() if part.tests)
    assert list(PARTS)[:2] == ["engines", "requests"] and parse([]).parts == list(PARTS)
    assert 1 <= gpu_check.workers() <= (os.cpu_count() or 1)


def test_without_a_gpu_nothing_is_checked(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: False)
    assert main(["--out", str(tmp_path / "out")]) == 2
    assert "expected an NVIDIA GPU" in capsys.readouterr().err and not (tmp_path / "out").exists()
