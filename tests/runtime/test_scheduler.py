"""Any number of callers and threads share an engine, and each gets what it would get alone."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import specstep
from fake_session import POISON, FakeSession, PrefillFailedError, alone
from hypothesis import given, settings
from hypothesis import strategies as st
from specstep.errors import EngineError, InputError
from specstep.runtime.asked.request import Request
from specstep.runtime.engine import Engine

PATIENCE = 30  # seconds after which a wait is taken for a hang


def engine_of(rows, **options):
    return Engine(FakeSession(rows, **options), None)


def is_idle(engine):
    """All rows are free, and the worker is gone, at once or a step later."""
    ends = time.monotonic() + PATIENCE
    while engine._scheduler._worker is not None and time.monotonic() < ends:
        time.sleep(0.001)
    session = engine.session
    return (
        engine._scheduler._worker is None and session.free_rows == session.spec.max_batch and not any(session.lengths)
    )


def request(prompt, new_tokens, stop_ids=()):
    return Request(list(prompt), len(prompt) + new_tokens, list(stop_ids))


prompts = st.lists(st.integers(0, POISON - 1), min_size=1, max_size=20)
actions = st.sampled_from(["read", "read", "cancel", "drop", "raise", "cancel from another thread", "fail"])
visits = st.tuples(st.lists(st.tuples(prompts, st.integers(1, 30)), min_size=1, max_size=4), actions, st.integers(0, 4))


def visit(engine, asked, action, reads):
    """One submission of a thread, and what it does with it."""
    requests = [request(prompt, count) for prompt, count in asked]
    if action == "fail":
        requests[-1] = request([*asked[-1][0], POISON, 1], 5)
    submission = engine.run(requests)
    try:
        for number, _ in enumerate(submission):
            if number < reads or action in ("read", "fail"):
                continue
            if action == "cancel":
                submission.cancel()
            elif action == "raise":
                raise KeyError("of the caller's own")
            elif action == "drop":
                break
            else:
                canceller = threading.Thread(target=submission.cancel)
                canceller.start()
                canceller.join()
    except (KeyError, PrefillFailedError) as error:
        assert (action == "fail") == isinstance(error, PrefillFailedError)
    else:
        assert action != "fail"
    for (prompt, count), made in zip(asked, requests, strict=True):
        expected = alone(prompt, len(prompt) + count)
        if POISON in made.prompt:
            assert made.tokens == []
        elif action == "read":
            assert made.tokens == expected and made.finish_reason == "length"
        else:
            assert made.tokens == expected[: len(made.tokens)]


@pytest.fixture(scope="module", autouse=True)
def switches():
    """Threads take turns often: more interleavings, and no waiting for turns."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(autouse=True, scope="module")
def small_heap():
    """Collecting garbage after every example would walk all that other tests of the process left behind: minutes."""
    gc.freeze()
    yield
    gc.unfreeze()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(visits, max_size=4), min_size=1, max_size=4), st.integers(1, 4), st.booleans())
def test_threads_notice_nobody(scripts, rows, overlaps):
    """Random interleavings of submissions that are read, cancelled, dropped or fail, against each request alone.
    overlaps: whether a step may begin before the last one is read."""
    engine, failures = engine_of(rows), []
    engine.session.overlaps = overlaps

    def run(script):
        try:
            for one in script:
                visit(engine, *one)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(script,), daemon=True) for script in scripts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a caller hangs"
    assert not failures, failures
    gc.collect()
    assert is_idle(engine)
    visit(engine, [([5], 9)], "read", 0)


def test_interleaved_iterators_share_the_rows():
    engine = engine_of(1)  # fewer rows than callers: one waits for the other
    first, second = (engine.submit(request([start], 12)) for start in (5, 6))
    pieces = [[], []]
    for one, other in zip(first, second, strict=False):
        pieces[0] += one.token_ids
        pieces[1] += other.token_ids
    pieces[0] += [token for piece in first for token in piece.token_ids]
    pieces[1] += [token for piece in second for token in piece.token_ids]
    assert pieces == [alone([5], 13), alone([6], 13)]


def test_a_generate_inside_a_stream_ends():
    engine = engine_of(1)
    outer = engine.submit(request([5], 20))
    tokens = list(next(outer).token_ids)
    assert engine.generate([[7, 8]], 5)[0].token_ids == alone([7, 8], 7)
    tokens += [token for piece in outer for token in piece.token_ids]
    assert tokens == alone([5], 21)


def test_closing_an_old_iterator_leaves_a_new_request_its_row():
    engine = engine_of(1)
    old = engine.submit(request([5], 50))
    next(old)
    old.cancel()
    new = engine.submit(request([6], 20))
    tokens = list(next(new).token_ids)
    old.cancel()
    del old
    gc.collect()
    assert tokens + [token for piece in new for token in piece.token_ids] == alone([6], 21)


def test_a_cancelled_request_keeps_what_was_read_and_says_so():
    engine = engine_of(2)
    stream = engine.submit(request([5], 60))
    read = list(next(stream).token_ids)
    stream.cancel()
    assert list(stream) == []
    result = stream.result()
    assert (result.token_ids, result.finish_reason) == (read, "cancelled")
    assert is_idle(engine)


def test_cancel_wakes_a_reader_of_another_thread():
    engine = engine_of(1)
    blocker = engine.submit(request([5], 80))
    waiting = engine.submit(request([6], 80))
    got = []
    reader = threading.Thread(target=lambda: got.append(list(waiting)), daemon=True)
    engine.session.pause = 0.05  # so that it surely waits
    reader.start()
    waiting.cancel()
    reader.join(PATIENCE)
    assert not reader.is_alive()
    blocker.cancel()


def test_a_failing_step_is_raised_to_those_in_it_and_the_next_request_runs():
    engine = engine_of(2, pause=0.01)
    engine.session.failing = 1
    streams = [engine.submit(request([start], 30)) for start in (5, 6)]
    failed = 0
    for stream, start in zip(streams, (5, 6), strict=True):
        try:
            assert stream.result().token_ids == alone([start], 31)
        except RuntimeError as error:
            assert str(error) == "a step that fails"
            failed += 1
    assert failed >= 1
    assert engine.generate([9], 4).token_ids == alone([9], 5)
    assert is_idle(engine)


def test_a_prefill_that_fails_leaves_nothing_behind():
    engine = engine_of(2)
    with pytest.raises(PrefillFailedError):
        engine.generate([[*range(10), POISON, 1]], 5)
    assert is_idle(engine) and engine.session.next_size() == (1, 64)


def test_callers_are_served_in_turn():
    """One prompt does not wait for a long list that was submitted before it."""
    engine = engine_of(1, pause=0.002)
    many = engine.run([request([start], 6) for start in range(20)])
    one = engine.submit(request([50], 6))
    one.result()
    waiting = next(caller for caller in engine._scheduler._callers)
    assert len(waiting.waiting) >= 15
    many.cancel()


def test_callers_get_a_row_in_the_order_they_came():
    engine = engine_of(1, pause=0.002)
    asked = [request([start], 6) for start in range(6)]
    for stream in [engine.submit(one) for one in asked]:
        stream.result()
    admitted = [one.submitted + one.queue_s for one in asked]
    assert admitted == sorted(admitted)


def test_queue_time_is_part_of_the_time_to_the_first_token():
    engine = engine_of(1, pause=0.005)
    first, second = engine.generate([[5], [6]], 20)
    assert second.stats["queue_s"] >= first.stats["decode_s"] > 0
    for stats in (first.stats, second.stats):
        assert stats["time_to_first_token_s"] >= stats["queue_s"] + stats["prefill_s"]


def test_how_many_wait_and_run():
    """At no moment fewer than there are."""
    engine, gate = engine_of(1), threading.Event()
    assert engine.occupancy == (0, 0)
    begin = engine.session.begin_step
    engine.session.begin_step = lambda *given: (gate.wait(PATIENCE), begin(*given))[1]
    streams = [engine.submit(request([start], 5)) for start in range(4)]
    left = len(streams)
    while engine.occupancy.running == 0:
        assert sum(engine.occupancy) == left
    assert engine.occupancy == (3, 1)
    streams[2].cancel()
    assert engine.occupancy == (2, 1)
    gate.set()
    for stream in (streams[0], streams[1], streams[3]):
        stream.result()
    assert engine.occupancy == (0, 0) and is_idle(engine)
    engine.close()
    assert engine.occupancy == (0, 0)


def test_a_request_can_be_submitted_once():
    engine, asked = engine_of(1), request([5], 3)
    engine.submit(asked).result()
    twice = request([5], 3)
    for requests in ([asked], [twice, twice]):
        with pytest.raises(InputError, match="expected new ones, got one that was submitted before"):
            engine.run(requests)


def test_a_closed_engine_ends_its_streams_and_refuses_more():
    with engine_of(1, pause=0.002) as engine:
        stream = engine.submit(request([5], 80))
        next(stream)
    list(stream)
    assert stream.request.finish_reason == "cancelled"
    for use in (lambda: engine.generate([5], 3), lambda: engine.submit(request([5], 3)), lambda: engine.session):
        with pytest.raises(EngineError, match="expected an open engine, got one that was closed"):
            use()
    engine.close()


def test_a_closed_engine_lets_go_of_its_session():
    engine = engine_of(1)
    engine.generate([5], 3)
    session = weakref.ref(engine.session)
    engine.close()
    gc.collect()
    assert session() is None


def test_an_empty_list_while_another_prompt_is_prefilled():
    engine = engine_of(2)
    started, go_on = threading.Event(), threading.Event()
    prefill = engine.session.prefill
    engine.session.prefill = lambda *given: (started.set(), go_on.wait(PATIENCE), prefill(*given))
    stream = engine.submit(request([5, 6], 9))
    started.wait(PATIENCE)
    assert list(engine.run([])) == []
    go_on.set()
    assert stream.result().token_ids == alone([5, 6], 11)


def test_an_interrupted_generate_gives_its_rows_back(monkeypatch):
    """Also while its traceback is kept, as notebooks do."""
    engine = engine_of(1, pause=0.002)
    advance = Request.advance

    def interrupted(self, event):
        advance(self, event)
        raise KeyboardInterrupt

    monkeypatch.setattr(Request, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt) as kept:
        engine.generate([5], 80)
    monkeypatch.undo()
    assert is_idle(engine) and kept is not None
    assert engine.generate([6], 4).token_ids == alone([6], 5)


def test_an_error_is_raised_at_each_further_read():
    engine = engine_of(1)
    stream = engine.submit(request([*range(10), POISON, 1], 5))
    for _ in range(2):
        with pytest.raises(PrefillFailedError):
            stream.result()


def test_failing_prefills_that_nobody_reads_run_once():
    engine, tried = engine_of(1), []
    prefill = engine.session.prefill
    engine.session.prefill = lambda *given: (tried.append(given), prefill(*given))
    submission = engine.run([request([*range(5), POISON, 1], 5) for _ in range(100)])
    assert is_idle(engine) and len(tried) == 1
    submission.cancel()


def test_a_row_is_free_again_when_its_release_fails():
    engine = engine_of(1)
    reset, failing = engine.session._reset, []

    def fail_once(row):
        if failing:
            raise RuntimeError(failing.pop())
        reset(row)

    engine.session._reset = fail_once
    stream = engine.submit(request([5], 90))
    next(stream)
    failing.append("the device is gone")
    stream.cancel()
    ends = time.monotonic() + PATIENCE
    while engine.broken is None and time.monotonic() < ends:
        time.sleep(0.001)
    assert str(engine.broken) == "the device is gone"
    with pytest.raises(EngineError, match="expected an open engine, got RuntimeError: the device is gone"):
        engine.generate([6], 4)
    assert engine._scheduler._rows.session.free_rows == 1
    engine.close()


def test_a_device_that_is_lost_while_nobody_asks_breaks_the_engine():
    """The next request cannot be given a row, nor can the row be freed."""
    engine = engine_of(1)

    def gone(*_):
        raise RuntimeError("the device is gone")

    engine.session.set = engine.session._reset = gone
    with pytest.raises(RuntimeError, match="row 0: expected to free it, got RuntimeError: the device is gone"):
        engine.generate(request([5], 4).prompt, 4)
    ends = time.monotonic() + PATIENCE
    while engine.broken is None and time.monotonic() < ends:
        time.sleep(0.001)
    assert "the device is gone" in str(engine.broken)
    with pytest.raises(EngineError, match="expected an open engine, got LostRowError"):
        engine.generate([6], 4)
    engine.close()


def test_a_worker_that_is_gone_without_a_word_is_seen(monkeypatch):
    """Its last words need memory that there is none of."""
    engine, session = engine_of(1, pause=0.01), None
    session = engine.session
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(engine._scheduler, "_fail", lambda error: (_ for _ in ()).throw(MemoryError))
    session._reset = lambda row: (_ for _ in ()).throw(MemoryError)
    monkeypatch.setattr(engine._scheduler, "_break", lambda error: (_ for _ in ()).throw(MemoryError))
    stream = engine.submit(request([5], 3))
    worker = engine._scheduler._worker
    assert worker is not None
    worker.join(PATIENCE)
    monkeypatch.undo()
    assert "thread has ended" in str(engine.broken)
    with pytest.raises(RuntimeError, match="thread has ended"):
        stream.result()
    with pytest.raises(EngineError, match="load it again"):
        engine.submit(request([5], 3))


def test_an_engine_that_is_closed_is_not_broken():
    engine = engine_of(1)
    assert engine.broken is None
    engine.close()
    assert engine.broken is None


def test_a_thread_that_cannot_start_is_an_error_and_the_next_submission_tries_again(monkeypatch):
    engine = engine_of(1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no more threads")))
        with pytest.raises(RuntimeError, match="no more threads"):
            engine.generate([5], 3)
    assert engine.generate([6], 4).token_ids == alone([6], 5)


def test_rows_taken_by_hand_are_an_error_and_no_hang():
    for rows in (1, 3):
        engine = engine_of(rows)
        engine.session.admit([5], 20, [])
        with pytest.raises(EngineError, match="expected all of them free, got 1 admitted outside"):
            engine.generate([6], 4)
        engine.session.release(0)
        assert engine.generate([6], 4).token_ids == alone([6], 5)


def test_a_forked_child_is_refused_while_the_engine_runs():
    engine = engine_of(1, pause=0.01)
    stream = engine.submit(request([5], 60))
    tokens = list(next(stream).token_ids)
    child = os.fork()
    if child == 0:
        try:
            engine.generate([6], 3)
        except EngineError as error:
            os._exit(0 if "forked while the engine was running" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert tokens + [token for piece in stream for token in piece.token_ids] == alone([5], 61)


@pytest.mark.parametrize("waits", [False, True], ids=["runs", "waits"])
def test_a_forked_child_that_reads_its_parents_stream_is_refused(waits):
    engine = engine_of(1, pause=0.01)
    streams = [engine.submit(request([start], 60)) for start in (5, 6)]
    tokens = list(next(streams[0]).token_ids)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PATIENCE)  # ends a child that waits
        try:
            streams[waits].result()
        except EngineError as error:
            os._exit(0 if "forked while the engine was running" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert tokens + [token for piece in streams[0] for token in piece.token_ids] == alone([5], 61)


def test_a_program_that_ends_in_the_middle_of_a_stream_ends(engine_folder):
    program = f"""
import specstep
engine = specstep.load({str(engine_folder)!r})
stream = engine.stream("hello", ignore_eos=True)
print(next(stream) is not None)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "True\n" and not done.stderr


@pytest.fixture(scope="module")
def engine(engine_folder):
    return specstep.load(engine_folder)


def test_streams_of_a_real_engine_in_threads(engine):
    """More threads than rows."""
    texts = ["hello", "a b c a b c a", "xyz" * 20, "1 2 3", "hello hello"]
    expected = [engine.generate(text, 30, ignore_eos=True).text for text in texts]
    got = {}

    def read(index):
        got[index] = "".join(engine.stream(texts[index], 30, ignore_eos=True))

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[index] for index in range(len(texts))] == expected


def test_the_worker_takes_the_thread_count_of_the_process(engine):
    """OpenMP's thread count belongs to a thread; that of a new one would be all cores again."""
    import torch

    seen, enter = [], engine.session.enter_thread
    assert torch.get_num_threads() == 1 and is_idle(engine)  # the last worker is gone
    engine.session.enter_thread = lambda: (enter(), seen.append(omp_threads()))
    try:
        engine.generate([5, 6], 2)
    finally:
        del engine.session.enter_thread
    assert seen == [1]


def test_a_caller_keeps_no_idle_threads_while_the_worker_runs(engine):
    """libgomp slows all barriers down where its threads, those of callers included, are more than the cores."""
    import torch

    def threads():
        for thread in threading.enumerate():
            if thread.name == "specstep":
                thread.join(PATIENCE)
        time.sleep(0.05)  # what has been joined is still a task for a moment
        return len(os.listdir("/proc/self/task"))

    def busy():
        torch.ones(2_000_000).sum()
        return threads()

    engine.generate([5, 6], 2)
    alone = busy()
    torch.set_num_threads(3)
    assert busy() == alone + 2, "no threads to give back"
    torch.set_num_threads(1)
    engine.generate([5, 6], 2)
    ends = time.monotonic() + PATIENCE
    while threads() > alone and time.monotonic() < ends:  # the worker is on its way out
        time.sleep(0.01)
    assert threads() <= alone


def omp_threads():
    """What OpenMP would use in this thread."""
    import ctypes

    lines = Path("/proc/self/maps").read_text().splitlines()
    return ctypes.CDLL(next(line.split(maxsplit=5)[5] for line in lines if "libgomp" in line)).omp_get_max_threads()
