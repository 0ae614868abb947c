"""Reading a submission without waiting, and being told when there is something to read."""

import os
import queue
import signal
import threading
import time

import pytest
from fake_session import POISON, FakeSession, PrefillFailedError, alone
from specstep.runtime.asked.request import Request
from specstep.runtime.engine import Engine

PATIENCE = 30  # seconds after which a wait is taken for a hang


def request(prompt, new_tokens):
    return Request(list(prompt), len(prompt) + new_tokens, [])


def polled(submission):
    """Everything, with a wait for the listener's call wherever there is nothing to read."""
    calls = queue.SimpleQueue()
    submission.listen(lambda _: calls.put(threading.current_thread().name))
    assert calls.get(timeout=PATIENCE) == threading.current_thread().name, "called at once, for what came before"
    while True:
        try:
            told = submission.poll()
        except StopIteration:
            return
        if told is None:
            calls.get(timeout=PATIENCE)
        else:
            yield told


def test_polling_reads_what_iterating_does():
    engine, asked = Engine(FakeSession(2), None), [request([start], 12) for start in (5, 6, 7)]
    got = {id(one): [] for one in asked}
    for one, tokens in polled(engine.run(asked)):
        got[id(one)] += tokens
    assert [got[id(one)] for one in asked] == [alone([start], 13) for start in (5, 6, 7)]


def test_a_poll_does_not_wait():
    engine = Engine(FakeSession(1, pause=0.05), None)
    submission = engine.run([request([5], 80)])
    assert submission.poll() is None
    submission.cancel()
    with pytest.raises(StopIteration):
        submission.poll()


def test_a_failure_and_a_cancel_are_told():
    engine = Engine(FakeSession(1, pause=0.01), None)
    with pytest.raises(PrefillFailedError):
        list(polled(engine.run([request([*range(10), POISON, 1], 5)])))
    submission = engine.run([request([5], 80)])
    threading.Timer(0.05, submission.cancel).start()
    assert len(list(polled(submission))) < 80


def test_a_listener_that_comes_late_misses_nothing():
    engine = Engine(FakeSession(1), None)
    submission = engine.run([request([5], 12)])
    while engine._scheduler._worker is not None:
        time.sleep(0.001)
    assert [token for _, tokens in polled(submission) for token in tokens] == alone([5], 13)


def test_a_listener_is_told_of_ends_alone():
    engine = Engine(FakeSession(2, pause=0.005), None)
    ends, asked = [], [request([5], 40), request([6], 20)]
    submission = engine.run(asked)
    submission.listen(lambda ended: ends.append(threading.current_thread().name) if ended else None)
    assert sum(len(tokens) for _, tokens in submission) == 60
    here = threading.current_thread().name
    assert ends[0] == here and len([name for name in ends if name != here]) == 2, "at once, then for each request"


def test_a_signal_inside_of_a_read_may_cancel(monkeypatch):
    """The handler runs in the thread that reads, wherever that is: here, while it takes in what a step did."""
    engine, asked = Engine(FakeSession(1), None), request([5], 40)
    stream, advance = engine.submit(asked), Request.advance
    waits = threading.Timer(PATIENCE, os.abort)  # a deadlock, which nothing else ends
    waits.daemon = True
    waits.start()

    def interrupted(self, event):
        if self.tokens:
            signal.raise_signal(signal.SIGINT)
        return advance(self, event)

    monkeypatch.setattr(Request, "advance", interrupted)
    before = signal.signal(signal.SIGINT, lambda *_: stream.cancel())
    try:
        tokens = [token for piece in stream for token in piece.token_ids]
    finally:
        signal.signal(signal.SIGINT, before)
        waits.cancel()
    assert asked.finish_reason == "cancelled" and tokens == asked.tokens == alone([5], 41)[: len(tokens)] != []


def test_an_error_that_means_the_end_to_a_reader_is_another_one():
    """`next(iterator)` in a mask is a common slip."""
    with Engine(FakeSession(1), None) as engine, pytest.raises(RuntimeError, match="failed with StopIteration") as told:
        engine.generate([5, 6], 8, allowed_tokens=lambda *_: next(iter(())))
    assert isinstance(told.value.__cause__, StopIteration)
