"""Contenders that answer in turns: what the bench's own loop says is what an engine says, and rows are given back."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from contender import Answers, seconds_of_each
from fake_session import FakeSession, alone
from specstep.runtime.asked.request import Request
from specstep.runtime.ladder.ladder import Ladder


def test_requests_are_answered_in_turn_until_a_row_is_free_for_which_none_waits():
    sessions = [FakeSession(2), FakeSession(4)]
    asked = [[Request([start, 1, 2], 20, []) for start in range(5)] for _ in sessions]
    answers = {
        str(number): Answers(session, requests, 2, Ladder([session.spec.nodes]))
        for number, (session, requests) in enumerate(zip(sessions, asked, strict=True))
    }
    seconds = seconds_of_each(answers, random.Random(0))
    assert seconds.keys() == answers.keys() and min(seconds.values()) > 0
    for session, requests, each in zip(sessions, asked, answers.values(), strict=True):
        assert session.free_rows == session.spec.max_batch
        assert each.tokens == sum(len(request.tokens) for request in requests)
        assert [request.tokens for request in requests[:3]] == [alone(request.prompt, 20) for request in requests[:3]]
        assert {request.finish_reason for request in requests} == {"length", "cancelled"}
