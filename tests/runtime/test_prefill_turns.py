"""Prompts are prefilled between the steps of others: a bounded part at a time, in turn, and nobody's text changes."""

import threading

import pytest
from fake_session import POISON, FakeSession, PrefillFailedError, alone
from specstep.errors import InputError
from specstep.runtime.asked.request import Request
from specstep.runtime.engine import Engine

CHUNK, LONG = 8, list(range(2, 92))  # of the fake session; a prompt of many chunks


class Watched:
    """An engine over a fake session that notes its prefills and steps in their order."""

    def __init__(self, rows, *, pause=0.002, **options):
        self.session = FakeSession(rows, pause=pause, accepts=lambda step, row: 0)
        self.engine = Engine(self.session, None, **options)
        self.log = []  # tokens of a chunk, or -rows of a step
        prefill, replay = self.session.prefill, self.session.replay
        self.session.prefill = lambda row, tokens, count, slots: (
            self.log.append(count), prefill(row, tokens, count, slots)
        )  # fmt: skip
        self.session.replay = lambda rows, *size: (self.log.append(-rows), replay(rows, *size))[1]

    def submit(self, prompt, new_tokens):
        return self.engine.submit(Request(list(prompt), len(prompt) + new_tokens, []))

    def between_steps(self):
        """The chunks ahead of each step."""
        found, chunks = [], []
        for entry in self.log:
            if entry < 0:
                found.append(chunks)
                chunks = []
            else:
                chunks.append(entry)
        return found


@pytest.mark.parametrize("most", [None, 2, 3, 5, 20])
def test_a_long_prompt_delays_a_stream_by_a_bounded_amount(most):
    watched = Watched(2, prefill_per_step=most)
    running = watched.submit([5], 80)
    tokens = list(next(running).token_ids)
    before = len(watched.between_steps())
    late = watched.submit(LONG, 9)
    assert late.result().token_ids == alone(LONG, 99)
    assert tokens + [t for piece in running for t in piece.token_ids] == alone([5], 81)
    turns = [chunks for chunks in watched.between_steps()[before:] if chunks]
    size = min(most or CHUNK, CHUNK)
    assert sum(map(sum, turns)) == 89 and max(map(sum, turns)) <= (most or CHUNK)
    assert all(chunk == size for chunk in [chunk for chunks in turns for chunk in chunks][:-1])
    assert len(turns) == -(-89 // ((most or CHUNK) // size * size))


@pytest.mark.parametrize("most", [None, 4])
def test_whole_chunks_run_back_to_back_when_nothing_decodes(most):
    watched = Watched(2, prefill_per_step=most)
    assert watched.submit(LONG, 5).result().token_ids == alone(LONG, 95)
    assert watched.log == [8] * 11 + [1] + [-1] * 5


def test_short_prompts_share_what_a_step_may_wait_for():
    watched = Watched(8)
    running = watched.submit([5], 60)
    next(running)
    before = len(watched.between_steps())
    with watched.engine.run([Request([start, 7, 1, 2], 40, []) for start in range(6)]) as others:
        for _ in others:
            pass
    assert max(map(sum, watched.between_steps()[before:])) in (6, 8)
    running.cancel()


def test_one_prompt_after_the_other_in_the_order_they_came():
    watched, prompts = Watched(4), [LONG[:30], LONG[:20], [7, 8], LONG[:40]]
    running = watched.submit([5], 90)
    next(running)
    requests = [Request(prompt, len(prompt) + 5, []) for prompt in prompts]
    for stream in [watched.engine.submit(request) for request in requests]:
        assert stream.result().token_ids == alone(stream.request.prompt, stream.request.limit)
    counts = [entry for entry in watched.log if entry > 0]
    assert counts == [8, 8, 8, 5, 8, 8, 3, 1, 8, 8, 8, 8, 7]
    running.cancel()


def test_a_row_that_is_being_filled_takes_no_part_in_steps():
    """Of four rows three run; then one of these ends, and its hole is filled by a move."""
    watched = Watched(4)
    counts = {5: 80, 6: 5, 7: 80}
    first = {start: watched.submit([start], count) for start, count in counts.items()}
    late = [watched.submit(prompt, 5) for prompt in (LONG, LONG[:50])]
    assert [stream.result().token_ids for stream in late] == [alone(LONG, 95), alone(LONG[:50], 55)]
    for start, stream in first.items():
        assert stream.result().token_ids == alone([start], 1 + counts[start])
    assert watched.session.copies and -3 in watched.log


def test_cancelling_frees_the_row_before_the_next_chunk():
    watched = Watched(1)
    prefill, streams = watched.session.prefill, []

    def cancel_at_the_third(*given):
        prefill(*given)
        if len(watched.log) == 3:
            streams[0].cancel()

    watched.session.prefill = cancel_at_the_third
    gate = threading.Event()  # the worker waits until the stream is known here
    start = watched.session.enter_thread
    watched.session.enter_thread = lambda: (gate.wait(30), start())
    streams.append(watched.submit(LONG, 5))
    gate.set()
    assert streams[0].result().finish_reason == "cancelled"
    assert watched.submit([6], 4).result().token_ids == alone([6], 5)
    assert watched.log[:3] == [8, 8, 8] and all(entry < 0 for entry in watched.log[3:])


def test_a_prefill_that_fails_half_way_fails_alone():
    watched = Watched(2)
    running = watched.submit([5], 80)
    tokens = list(next(running).token_ids)
    with pytest.raises(PrefillFailedError):
        watched.submit([*LONG[:30], POISON, 1], 5).result()
    assert tokens + [t for piece in running for t in piece.token_ids] == alone([5], 81)
    assert watched.submit(LONG, 5).result().token_ids == alone(LONG, 95)


def test_closing_in_the_middle_of_a_prompt():
    watched = Watched(1)
    started, go_on, prefill = threading.Event(), threading.Event(), watched.session.prefill
    watched.session.prefill = lambda *given: (started.set(), go_on.wait(30), prefill(*given))
    stream = watched.submit(LONG, 5)
    started.wait(30)
    closing = threading.Thread(target=watched.engine.close)
    closing.start()
    while not watched.engine._scheduler._closed:
        pass
    go_on.set()
    closing.join(30)
    assert list(stream) == [] and stream.result().finish_reason == "cancelled" and watched.log == [8]


def test_a_session_refuses_a_step_that_would_write_over_a_prompt():
    session = FakeSession(2)
    row = session.begin(LONG, 95, [])
    session.admit([5], 20, [])
    assert not session.fill(row, CHUNK)
    with pytest.raises(RuntimeError, match="compact them"):
        session.step()
    while not session.fill(row, CHUNK):
        pass
    assert sorted(session.step()) == [0, 1]


@pytest.mark.parametrize("wrong", [0, -3, 2.5, True])
def test_a_number_that_cannot_be_is_refused(wrong):
    with pytest.raises(InputError, match="prefill_per_step: expected an integer of at least 1"):
        Engine(FakeSession(1), None, prefill_per_step=wrong)
