"""Kills processes at random moments of what they write: the old or the new must be whole, and no litter may stay."""

import itertools
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

LONGEST = 0.15  # seconds until a kill, at most


class Writes(NamedTuple):
    """Something that is written again and again. write(place, turn) writes a new version; read(place) -> the turn of
    a whole one, -1 for none, raises for less; litter(place): what is there that should not be."""

    write: Callable[[Path, int], None]
    read: Callable[[Path], int]
    litter: Callable[[Path], list[str]]


def kill_one(task: Writes, place: Path, rng: random.Random) -> str:
    """Kill a process that writes version after version -> what is wrong then, empty for nothing."""
    started, ready = os.pipe()
    before = task.read(place)
    child = os.fork()
    if child == 0:
        os.write(ready, b"x")
        for turn in itertools.count(before + 1):
            task.write(place, turn)
    os.read(started, 1)
    time.sleep(rng.random() * LONGEST)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(started), os.close(ready)
    if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
        return f"the writer ended by itself, with {os.waitstatus_to_exitcode(status)}"
    try:
        found = task.read(place)
        if found < before:
            return f"expected version {before} or a later one, got {found}"
        task.write(place, found + 1)  # the next write cleans up
        if task.read(place) != found + 1:
            return f"expected version {found + 1} after a write, got {task.read(place)}"
    except Exception as error:  # the campaign's question
        return f"{type(error).__name__}: {error}"
    left = task.litter(place)
    return f"litter: {' '.join(left)}" if left else ""


def engine_writes(engine: Path) -> Writes:
    """An engine over an old one: what a build writes at its end, and the swap."""
    from specstep.compile.writer import engine_directory
    from specstep.runtime.engine_file import MANIFEST, check_files, read_manifest

    def write(place: Path, turn: int) -> None:
        with engine_directory(place) as work:
            for path in engine.iterdir():
                if path.name != MANIFEST:
                    shutil.copy(path, work)
            manifest = json.loads((engine / MANIFEST).read_text())
            manifest["about"]["turn"] = turn
            (work / MANIFEST).write_text(json.dumps(manifest))

    def read(place: Path) -> int:
        if not place.exists():
            return -1
        manifest = read_manifest(place)
        check_files(place, manifest, deep=True)
        return int(manifest.about["turn"])

    return Writes(write, read, others)


def learned_writes() -> Writes:
    """Learned tables."""
    import numpy as np
    from safetensors.numpy import load_file
    from specstep.runtime.learned import header, write_table

    def write(place: Path, turn: int) -> None:
        write_table(place, np.full((16385, 16), turn), header(320, None))

    def read(place: Path) -> int:
        if not place.exists():
            return -1
        table = load_file(place)["learned"]
        assert (table == table[0, 0]).all(), "expected one version, got two"
        return int(table[0, 0])

    return Writes(write, read, others)


def collected_writes() -> Writes:
    """Collected data, shard by shard; a version is a sequence."""
    from specstep.train.data.reader import MANIFEST, Data, DataManifest, read_manifest
    from specstep.train.data.writer import DataWriter

    def write(place: Path, turn: int) -> None:
        with DataWriter(place, DataManifest("tiny", vocab_size=50, tokenizer="abc"), shard_tokens=4) as writer:
            writer.add([turn % 50] * 2000, 0)

    def read(place: Path) -> int:
        if not (place / MANIFEST).exists() or not read_manifest(place).shards:
            return -1
        data = Data(place)
        for index in range(max(0, len(data) - 3), len(data)):
            assert data[index].tokens.tolist() == [index % 50] * 2000, f"sequence {index} is another"
        return len(data) - 1

    def litter(place: Path) -> list[str]:
        return [path.name for path in place.iterdir() if path.suffix == ".tmp"]

    return Writes(write, read, litter)


def others(place: Path) -> list[str]:
    """What lies beside a place."""
    return [path.name for path in place.parent.iterdir() if path != place]


def writers(engine: Path) -> dict[str, Writes]:
    """All that is written while the project runs."""
    return {"engine": engine_writes(engine), "learned": learned_writes(), "collected": collected_writes()}


def campaign(engine: Path, folder: Path, kills: int, seed: int = 0) -> dict[str, dict[str, int]]:
    """Kill so many processes -> for each kind of write, how often what was wrong; "" counts those where nothing was."""
    tasks = writers(engine)
    found: dict[str, dict[str, int]] = {name: {} for name in tasks}
    for number, name in zip(range(kills), itertools.cycle(tasks), strict=False):
        (folder / name).mkdir(parents=True, exist_ok=True)
        wrong = kill_one(tasks[name], folder / name / "it", random.Random(seed + number))
        found[name][wrong] = found[name].get(wrong, 0) + 1
    return found
