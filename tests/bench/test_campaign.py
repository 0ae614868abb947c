"""A short form of the campaign: engines that are damaged at random, writers that are killed, a disk that is full."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from campaign.full_disk import write_limited
from campaign.kills import kill_one, writers

BENCH = Path(__file__).parents[2] / "bench"
TASKS = ("engine", "learned", "collected")


def test_damaged_engines_end_in_one_line(engine_folder):
    """In a process without threads, which it forks."""
    command = [sys.executable, "-m", "campaign.loads", str(engine_folder), "1000000", "1000040", "-v"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=BENCH)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same text" in done.stdout and "one line" in done.stdout


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("name", TASKS)
def test_a_killed_writer_leaves_the_old_or_the_new(engine_folder, tmp_path, name):
    task, place = writers(engine_folder)[name], tmp_path / name / "it"
    place.parent.mkdir()
    assert [wrong for seed in range(6) if (wrong := kill_one(task, place, random.Random(seed)))] == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("name", TASKS)
def test_a_full_disk_leaves_the_old(engine_folder, tmp_path, name):
    task, place = writers(engine_folder)[name], tmp_path / name / "it"
    place.parent.mkdir()
    task.write(place, 0)
    assert [wrong for limit in (0, 1, 300, 8000, 200_000) if (wrong := write_limited(task, place, limit))] == []
