"""Which cores each rank computes on."""

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specstep.runtime.ranks.cores import listed, shared_cores, stay_on


@pytest.fixture
def system(tmp_path):
    """A machine of two NUMA nodes with four cores each, whose second processors have the numbers behind all first ones,
    as on most."""
    for number, cpus in ((0, "0-3,8-11\n"), (1, "4-7,12-15\n"), (2, "\n")):
        (tmp_path / "node" / f"node{number}").mkdir(parents=True)
        (tmp_path / "node" / f"node{number}" / "cpulist").write_text(cpus)
    (tmp_path / "node" / "node-other").mkdir()
    for cpu in range(16):
        folder = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    return tmp_path


@pytest.mark.parametrize(("text", "numbers"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("\n", set()), ("7", {7})])
def test_lists_are_read(text, numbers):
    assert listed(text) == numbers


@pytest.mark.parametrize(
    ("allowed", "ranks", "expected"),
    [
        (range(16), 2, [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]),
        (range(16), 4, [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}]),
        (range(16), 3, [{0, 1, 8, 9}, {2, 3, 4, 10, 11, 12}, {5, 6, 7, 13, 14, 15}]),
        ((1, 9, 4, 12), 2, [{1, 9}, {4, 12}]),
        ((1, 9), 2, [{1}, {9}]),
        ((6,), 2, [{6}, {6}]),
    ],
)
def test_ranks_have_whole_cores_of_a_node(allowed, ranks, expected, system, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*allowed}, raising=False)
    assert shared_cores(ranks, system) == expected


def test_a_system_without_a_word_has_a_processor_a_core(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    assert shared_cores(2, tmp_path) == [{0, 1}, {2, 3}]


@given(st.sets(st.integers(0, 40), min_size=1), st.integers(1, 9))
def test_shares_are_equal_and_all_is_shared(allowed, ranks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda process: allowed, raising=False)
        shares = shared_cores(ranks, Path("/nowhere"))
    assert set().union(*shares) == allowed
    if len(allowed) >= ranks:
        assert sum(map(len, shares)) == len(allowed)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_system_that_says_nothing_is_left_alone(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    shares = shared_cores(3)
    assert shares == [set()] * 3
    stay_on(shares[0])


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_a_thread_stays_and_others_do_not():
    before, seen = os.sched_getaffinity(0), []

    def run(cores):
        stay_on(cores)
        seen.append(os.sched_getaffinity(0))

    for cores in ({min(before)}, {4000}):  # one that no machine has
        thread = threading.Thread(target=run, args=(cores,))
        thread.start()
        thread.join()
    assert seen == [{min(before)}, before] and os.sched_getaffinity(0) == before
