"""Which cores each rank computes on."""

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specstep.runtime.ranks.cores import node_cores, shared_cores, stay_on


@pytest.fixture
def nodes(tmp_path):
    """A machine of two NUMA nodes, whose cores are numbered in turn, as many are."""
    for number, cores in ((0, "0-3,8-11\n"), (1, "4-7,12-15\n"), (2, "\n")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cores)
    (tmp_path / "node-other").mkdir()
    return tmp_path


def test_cores_of_nodes_are_read(nodes, tmp_path):
    assert node_cores(nodes) == {0: {0, 1, 2, 3, 8, 9, 10, 11}, 1: {4, 5, 6, 7, 12, 13, 14, 15}, 2: set()}
    assert node_cores(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("allowed", "ranks", "expected"),
    [
        (range(16), 2, [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]),
        (range(16), 4, [{0, 1, 2, 3}, {8, 9, 10, 11}, {4, 5, 6, 7}, {12, 13, 14, 15}]),
        ((1, 4, 5), 2, [{1}, {4, 5}]),
        ((6,), 2, [{6}, {6}]),
    ],
)
def test_ranks_lie_in_nodes(allowed, ranks, expected, nodes, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*allowed}, raising=False)
    assert shared_cores(ranks, nodes) == expected


@given(st.sets(st.integers(0, 40), min_size=1), st.integers(1, 9))
def test_shares_are_equal_and_all_is_shared(allowed, ranks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda process: allowed, raising=False)
        shares = shared_cores(ranks)
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
