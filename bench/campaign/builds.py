"""Kills real builds at random moments, and builds with damaged drafters."""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .damage import of_bytes, of_files, of_json_file
from .loads import Outcome, in_a_fork, tokens_of

CLI = "from specstep.cli import main; raise SystemExit(main())"
SMALL = ["--dtype", "float32", "--max-seq-len", "128", "--prefill-chunk", "16"]


def start_build(model: Path, place: Path, log: Path) -> "subprocess.Popen[bytes]":
    """Begin a build in a session of its own, with its compilers in it, and its temporary files beside the log."""
    command = [sys.executable, "-c", CLI, "build", str(model), "-o", str(place), "--drafter", "ngram", *SMALL]
    with log.open("wb") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=file, start_new_session=True, env={**os.environ, "TMPDIR": str(log.parent)}
        )


def kill_build(model: Path, place: Path, seconds: float, rng: random.Random) -> str:
    """Kill a build over an engine at a random moment of so many seconds -> what is wrong then, empty for nothing."""
    from specstep.runtime.engine_file import check_files, read_manifest

    with tempfile.TemporaryDirectory(prefix="killed-build-") as temporary:
        log = Path(temporary) / "log"
        build = start_build(model, place, log)
        time.sleep(rng.random() * seconds)
        os.killpg(build.pid, signal.SIGKILL)
        if build.wait() not in (-signal.SIGKILL, 0):
            return f"the build ended by itself, with {build.returncode}: {log.read_text()[-300:]}"
    try:
        check_files(place, read_manifest(place), deep=True)
    except Exception as error:  # the campaign's question
        return f"{type(error).__name__}: {error}"
    return ""


def kill_builds(model: Path, folder: Path, kills: int) -> dict[str, int]:
    """Kill so many builds over one engine, and let the last one end -> how often what was wrong."""
    from .kills import others

    place, log = folder / "built" / "it", folder / "log"
    place.parent.mkdir()
    began = time.monotonic()
    if start_build(model, place, log).wait():
        raise SystemExit(f"campaign: {model}: expected a model that builds, got: {log.read_text()[-300:]}")
    seconds, found = time.monotonic() - began, dict[str, int]()
    for number in range(kills):
        wrong = kill_build(model, place, seconds, random.Random(number))
        found[wrong] = found.get(wrong, 0) + 1
    start_build(model, place, log).wait()
    if left := others(place):
        found[f"litter: {' '.join(left)}"] = 1
    return found


def damaged_drafters(model: Path, drafter: Path, seeds: range) -> Iterator[Outcome]:
    """Run a model with damaged copies of a drafter's directory: the same text, which no drafter may change, or one
    line."""
    expected = in_a_fork(lambda: _text(model, drafter))[1]
    for seed in seeds:
        rng = random.Random(seed)
        with tempfile.TemporaryDirectory(prefix="drafter-") as work:
            copy = Path(work) / "drafter"
            shutil.copytree(drafter, copy)
            done = rng.choice([of_bytes, of_files, of_json_file, of_json_file])(copy, rng)
            end, said = in_a_fork(lambda copy=copy: _text(model, copy), expected)
        yield Outcome(seed, f"drafter: {done}", end, said)


def _text(model: Path, drafter: Path) -> str:
    import specstep

    options = {"dtype": "float32", "max_seq_len": 128, "prefill_chunk": 16}
    with specstep.eager(str(model), drafter=str(drafter), **options) as engine:  # type: ignore[arg-type]
        return tokens_of(engine)
