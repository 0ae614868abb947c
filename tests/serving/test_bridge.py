"""The answers of one call in an event loop: what goes out together, and when."""

import asyncio
from itertools import chain

import pytest
from fake_session import POISON, FakeSession, alone
from served import PATIENCE
from specstep.runtime.asked.request import Request
from specstep.runtime.engine import Engine
from specstep.serving.bridge import Answer

NEVER = 3600.0  # seconds between two lists that no test lives through


def read(requests, interval, rows=2, failing_after=None):
    """The lists of an answer, each choice as (choice, tokens of its steps, finish reason), and what was raised."""
    session = FakeSession(rows, pause=0.004)

    async def all_of_them():
        lists = []
        async with asyncio.timeout(PATIENCE):
            try:
                async for grown in Answer(engine, requests).read(interval):
                    steps = [[piece.token_ids for piece in each.pieces] for each in grown]
                    assert [each.token_ids for each in grown] == [list(chain(*tokens)) for tokens in steps]
                    reasons = [each.request.finish_reason for each in grown]
                    lists.append(list(zip([each.choice for each in grown], steps, reasons, strict=True)))
                    if failing_after is not None and len(lists) > failing_after:
                        session.failing = 1
            except RuntimeError as error:
                return lists, error
        return lists, None

    with Engine(session, None) as engine:
        return asyncio.run(all_of_them())


def asked(*sizes):
    return [Request([5 + place], 1 + size, []) for place, size in enumerate(sizes)]


@pytest.mark.parametrize("interval", [0.0, 0.02, NEVER])
def test_every_token_comes_once_and_in_order(interval):
    lists, error = read(asked(30, 50, 20), interval)
    assert error is None
    for choice, size in enumerate((30, 50, 20)):
        told = [(steps, reason) for each in lists for number, steps, reason in each if number == choice]
        assert [token for steps, _ in told for step in steps for token in step] == alone([5 + choice], 1 + size)
        assert [reason for _, reason in told] == [None] * (len(told) - 1) + ["length"]
    assert all(len({choice for choice, _, _ in each}) == len(each) for each in lists), "a choice twice in a list"


def test_steps_between_two_lists_come_as_one():
    requests = asked(60)
    lists, _ = read(requests, 0.02)
    steps = [len(each[0][1]) for each in lists]
    assert sum(steps) == requests[0].steps
    assert steps[0] == 1, "the first goes out at once"
    assert max(steps) > 1


def test_an_end_waits_for_nothing():
    lists, _ = read(asked(40, 20), NEVER)
    ends = [[choice for choice, _, reason in each if reason] for each in lists]
    assert [choice for each in ends for choice in each] == [1, 0]
    assert all(ends[1:]), "only the first list is not that of an end"


def test_what_came_before_a_failure_is_read():
    requests = asked(50)
    lists, error = read(requests, NEVER, failing_after=0)
    assert "a step that fails" in str(error)
    assert [token for each in lists for _, steps, _ in each for step in steps for token in step] == requests[0].tokens
    lists, error = read([Request([*range(10), POISON, 1], 20, [])], NEVER)
    assert lists == [] and error is not None
