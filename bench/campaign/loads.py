"""Loads damaged engines, each in a process of its own that was forked ready: what comes of it is one word."""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .damage import LEARNED, damage

PROMPT, NEW = [5, 17, 40, 3], 6
MESSAGES = [{"role": "user", "content": "hello"}]
SAME, REFUSED = "the same text", "one line"  # all else is a defect, or another model
OTHER = "another text"
PATIENCE = 120  # seconds


class Outcome(NamedTuple):
    """What came of an engine: its seed, what was done to it, how it ended, and what it said."""

    seed: int
    damage: str
    end: str
    said: str


def tokens_of(engine: Any) -> str:
    """What an engine says."""
    return str(engine.generate(PROMPT, NEW, ignore_eos=True).token_ids)


def texts(folder: Path) -> str:
    """Load an engine, and what it learned where that is there, and have it say something."""
    import specstep
    from specstep.commands.describe import describe
    from specstep.runtime.engine_file import read_manifest

    describe(read_manifest(folder))
    learned = folder / LEARNED if (folder / LEARNED).exists() else None
    with specstep.load(folder, nodes="all", deep_check=True, learned=learned) as engine:
        tokens = tokens_of(engine)
        asked = engine.tokenizer.encode_messages(MESSAGES) if engine.text else None
    return f"{tokens} {asked}"


def end_of(run: Callable[[], str], expected: str) -> tuple[str, str]:
    """How it ends, in this process: a word, and what was said."""
    from specstep.errors import SpecstepError

    try:
        said = run()
    except SpecstepError as error:
        return (REFUSED if str(error).isprintable() and len(str(error)) < 2000 else "lines"), str(error)
    except BaseException as error:  # the campaign's question
        frames = traceback.extract_tb(error.__traceback__)
        return "traceback", f"{type(error).__name__}: {error!s:.200} at {[f'{f.name}:{f.lineno}' for f in frames[-4:]]}"
    return (SAME if said == expected else OTHER), said


def in_a_fork(run: Callable[[], str], expected: str = "") -> tuple[str, str]:
    """`end_of`, in a forked process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        end, said = end_of(run, expected)
        os.write(write, f"{end}\n{said}".encode("utf-8", "backslashreplace")[:4000])
        os._exit(0)
    os.close(write)
    until = time.monotonic() + PATIENCE
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(read)
            return "hang", ""
        time.sleep(0.002)
    with os.fdopen(read, "rb") as file:
        end, _, said = file.read().decode().partition("\n")
    code = os.waitstatus_to_exitcode(ended[1])
    return (end, said) if code == 0 else (f"signal {-code}" if code < 0 else f"status {code}", said)


def campaign(engines: list[Path], seeds: range) -> Iterator[Outcome]:
    """Damage and load an engine for each seed."""
    import torch
    from specstep.commands import describe  # noqa: F401 (once, for all forks)
    from specstep.runtime import open_directory  # noqa: F401
    from specstep.runtime.inductor import aoti  # noqa: F401

    torch.set_num_threads(1)
    expected = {engine: in_a_fork(lambda engine=engine: texts(engine))[1] for engine in engines}
    # Beside the engines: links do not leave a file system.
    with tempfile.TemporaryDirectory(prefix="campaign-", dir=engines[0].parent) as work:
        for seed in seeds:
            rng, folder = random.Random(seed), Path(work) / str(seed)
            engine = rng.choice(engines)
            done = damage(engine, folder, rng)
            end, said = in_a_fork(lambda folder=folder: texts(folder), expected[engine])
            yield Outcome(seed, f"{engine.name}: {done}", end, said)
            shutil.rmtree(folder, ignore_errors=True)


def is_defect(outcome: Outcome) -> bool:
    """Whether an outcome must not be. Files altered with right sums are another model, with another text."""
    altered = any(word in outcome.damage for word in (": tokenizer", ": weights", "about.special_tokens"))
    return outcome.end not in (SAME, REFUSED) and not (altered and outcome.end == OTHER)


if __name__ == "__main__":
    defects = 0
    for outcome in campaign([Path(sys.argv[1])], range(int(sys.argv[2]), int(sys.argv[3]))):
        defects += is_defect(outcome)
        if is_defect(outcome) or "-v" in sys.argv:
            print(*outcome, flush=True)
    sys.exit(min(defects, 1))
