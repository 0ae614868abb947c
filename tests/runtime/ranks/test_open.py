"""How ranks join, and what happens where one ends: over processes and a communicator that a test ends as it likes."""

import os
import pickle
from threading import Event, Thread

import numpy as np
import pytest
import specstep
import torch
from models import tiny_model
from specstep.compile.assemble import assemble
from specstep.compile.config import make_config
from specstep.compile.source import Source
from specstep.errors import EngineError
from specstep.runtime.inductor.torch_session import TorchSession
from specstep.runtime.ranks import processes
from specstep.runtime.ranks import session as ranks_session
from specstep.runtime.ranks.arithmetic import arithmetic
from specstep.runtime.ranks.follower import follow
from specstep.runtime.ranks.open import _join
from specstep.runtime.ranks.processes import leave_when_one_ends
from specstep.runtime.ranks.session import RankSession


class Communicator:
    """One rank's part, which ends nothing and notes that it left."""

    failure = None

    def __init__(self):
        self.joined = True

    def bound(self):
        return torch.no_grad()  # any block

    def leave(self):
        self.joined = False


class Process:
    """A further rank that makes no calls."""

    def __init__(self):
        self.has_ended, self.calls, self.said = False, [], None

    def send(self, calls):
        self.calls += [pickle.loads(call) for call in calls]

    def wait_for_answer(self):
        if self.said:
            raise EngineError(self.said)

    def ended(self):
        return EngineError("rank 1 has ended")

    def close(self):
        pass


class Place:
    """Where ranks meet once `open` is set."""

    def __init__(self, error=None):
        self.open, self.error, self.entered = Event(), error, 0

    def enter(self):
        self.entered += 1

    def join(self, rank, ranks):
        self.open.wait()
        if self.error:
            raise self.error
        return rank, ranks


def test_ranks_join_in_a_place_that_was_entered():
    place = Place()
    Thread(target=place.open.set).start()
    assert _join(place, [Process(), Process()]) == (0, 3) and place.entered == 1


def test_a_rank_that_ends_before_all_have_joined_ends_the_waiting():
    place, other = Place(), Process()
    other.has_ended = True
    with pytest.raises(EngineError, match="rank 1 has ended"):
        _join(place, [Process(), other])
    place.open.set()


def test_what_a_rank_says_before_it_ends_is_told():
    place, other = Place(), Process()
    other.has_ended, other.said = True, "ncclCommInitRank: no room in /dev/shm"
    with pytest.raises(EngineError, match="no room in /dev/shm"):
        _join(place, [other])
    place.open.set()


def test_why_ranks_cannot_join_is_passed_on():
    place = Place(OSError("no network"))
    place.open.set()
    with pytest.raises(OSError, match="no network"):
        _join(place, [Process()])


def test_a_rank_leaves_once_another_has_ended(monkeypatch):
    monkeypatch.setattr(processes, "LOOK", 0.001)
    communicator, other = Communicator(), Process()
    watching = Thread(target=leave_when_one_ends, args=([Process(), other], communicator))
    watching.start()
    assert communicator.joined and watching.is_alive()
    other.has_ended = True
    watching.join(60)
    assert not communicator.joined and not watching.is_alive()


def test_watching_ends_with_the_engine(monkeypatch):
    monkeypatch.setattr(processes, "LOOK", 0.001)
    communicator = Communicator()
    watching = Thread(target=leave_when_one_ends, args=([Process()], communicator))
    watching.start()
    communicator.leave()
    watching.join(60)
    assert not watching.is_alive()


@pytest.fixture
def session(monkeypatch):
    """The first rank of two, whose steps are begun as on a GPU; a step's report is its number."""
    config = make_config({"drafter": "ngram", "nodes": 2, "dtype": "float32", "max_seq_len": 64})
    graphs = assemble(Source("model", tiny_model("Llama").eval(), None), config)
    made = RankSession(graphs.spec, [*graphs.programs.values()], Communicator(), [Process()], 1, arithmetic())
    monkeypatch.setattr("specstep.runtime.ranks.session.close_all", lambda others: None)
    monkeypatch.setattr(made, "overlaps", True)
    numbers = iter(range(9))

    def begin(session, *size):
        number = next(numbers)
        return lambda: np.array([number])

    monkeypatch.setattr(TorchSession, "begin_replay", begin)
    yield made
    made.close()


def test_a_step_that_is_begun_is_begun_by_all(session):
    first, second = session.begin_replay(1, 64, 2, 0), session.begin_replay(1, 64, None, 0)
    (other,) = session.others
    assert other.calls == [("begin_replay", (1, 64, 2, 0)), ("begin_replay", (1, 64, None, 0))]
    assert [first()[0], second()[0]] == [0, 1]


def test_a_report_of_a_rank_that_has_left_is_none(session):
    """A GPU's wait ends without an error: what it gathered is nothing."""
    report = session.begin_replay(1, 64, 2, 0)
    (other,) = session.others
    other.has_ended = True
    session._communicator.leave()
    with pytest.raises(specstep.EngineError, match="rank 1 has ended"):
        report()
    with pytest.raises(specstep.EngineError, match="rank 1 has ended"):
        session.begin_replay(1, 64, 2, 0)
    assert len(other.calls) == 1


def test_a_report_that_is_read_at_once_is_checked_too(session, monkeypatch):
    def replay(session, *size):
        session._communicator.leave()
        return np.array([0])

    monkeypatch.setattr(TorchSession, "replay", replay)
    with pytest.raises(specstep.EngineError, match="ranks: expected a step of all, got another rank has ended"):
        session.replay(1, 64, 2, 0)


def test_why_a_gpu_could_not_gather_is_told(session, monkeypatch):
    """A program passes on where it failed, and not what NCCL said."""

    def replay(session, *size):
        session._communicator.failure = "ncclAllGather: unhandled system error"
        raise RuntimeError("API call failed at wrapper.cpp, line 509")

    monkeypatch.setattr(TorchSession, "replay", replay)
    with pytest.raises(specstep.EngineError, match="got ncclAllGather: unhandled system error"):
        session.replay(1, 64, 2, 0)


def test_closing_forgets_the_graphs_of_a_session(session):
    session._replays.get((1, 64, 2, 0), lambda: lambda: None)
    session.close()
    assert len(session._replays) == 0 and not session._communicator.joined


@pytest.mark.parametrize(("ends", "looks"), [(True, 3), (False, 4)])
def test_a_step_that_was_begun_ends_before_its_rank_leaves(ends, looks, monkeypatch):
    """Or has had time enough."""
    told, clock = [], iter([0.0, 1.0, 2.0, 3.0, 99.0])

    class Event:
        def record(self):
            told.append("record")

        def query(self):
            told.append("query")
            return ends and told.count("query") == looks

    communicator = Communicator()
    monkeypatch.setattr(communicator, "leave", lambda: told.append("leave"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda gpu: torch.no_grad())
    monkeypatch.setattr(ranks_session.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(ranks_session.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(ranks_session, "close_all", lambda others: told.append("close"))
    ranks_session._end(os.getpid(), communicator, [], torch.device("cuda", 0))
    assert told == ["record", *["query"] * looks, "leave", "close"]


def test_a_follower_begins_a_step_before_it_waits_for_the_last(session):
    """So that no GPU waits for the other's host."""
    told = []

    class Follower:
        def set(self, *arguments):
            told.append(("set", *arguments))

        def begin_replay(self, number):
            told.append(("begin", number))
            return lambda: told.append(("wait", number))

    class Connection:
        def __init__(self, *batches):
            self.batches = [pickle.dumps([pickle.dumps(call) for call in calls]) for calls in batches]

        def recv_bytes(self):
            if not self.batches:
                raise EOFError
            return self.batches.pop(0)

    begin, change = [("begin_replay", (number,)) for number in range(3)], ("set", ("lengths", 0, 5))
    follow(Connection([begin[0]], [change, begin[1]], [begin[2]]), Follower())
    assert told == [
        ("begin", 0), ("set", "lengths", 0, 5), ("begin", 1), ("wait", 0), ("begin", 2), ("wait", 1)
    ]  # fmt: skip
