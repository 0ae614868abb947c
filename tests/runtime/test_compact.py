"""Rows that move down, so that few rows cost few rows: nobody notices but the clock."""

import pytest
import specstep
from fake_session import FakeSession, alone
from models import save_eagle3
from specstep.runtime.asked.request import Request
from specstep.runtime.engine import Engine
from specstep.runtime.session import rows_for

PROMPTS = [[40, 41, 42] * 9, list(range(30, 53)), [9, 8, 9, 8]]


@pytest.mark.parametrize(("count", "rows"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6)])
def test_a_step_runs_a_power_of_two_or_all_rows(count, rows):
    assert rows_for(count, 6) == rows


def test_a_row_moves_with_all_that_it_has():
    session = FakeSession(4)
    for start in (5, 6, 7):
        session.admit([start, 1, 2], 40, [])
    session.step()
    length = session.lengths[2]
    session.release(0)
    session.release(1)
    assert session.next_size()[0] == 4 and session.compact(2) == {2: 0} and session.compact(2) == {}
    assert session.lengths == [length, 0, 0, 0] and session.free_rows == 3 and session.next_size()[0] == 1
    tokens = session.state["history"][0, 3 : length + 1].tolist()
    tokens += [token for _ in range(5) for token in session.step()[0].tokens]
    assert tokens == alone([7, 1, 2], 40)[: len(tokens)]


@pytest.mark.parametrize("overlaps", [False, True])
def test_rows_move_when_the_step_gets_smaller_and_only_then(overlaps):
    """overlaps: whether a step may begin before the last one is read."""
    session, sizes = FakeSession(8, accepts=lambda step, row: 0), []
    session.overlaps = overlaps
    engine, replay = Engine(session, None), session.replay
    session.replay = lambda rows, *size: (sizes.append(rows), replay(rows, *size))[1]
    requests = [Request([start, 1], 22 + 12 * (start % 4 == 3) + 40 * (start == 7), []) for start in range(8)]
    for request, _ in engine.run(requests):
        assert request.tokens == alone(request.prompt, request.limit)[: len(request.tokens)]
    assert all(request.finish_reason == "length" for request in requests)
    assert sizes[sizes.index(8) :] == sorted(sizes[sizes.index(8) :], reverse=True) and sizes[-1] == 1
    assert session.copies == [(3, 0), (7, 1), (1, 0)]


@pytest.mark.parametrize("backend", ["eagle3", "draft model", "onnx"])
def test_a_row_that_moved_says_what_it_would_have(backend, model_folder, drafter_folder, onnx_folder, tmp_path):
    options = {"dtype": "float32", "max_batch": 2, "max_seq_len": 128, "prefill_chunk": 16}
    if backend == "onnx":
        session = specstep.load(onnx_folder).session
    else:
        drafter = save_eagle3(tmp_path / "head") if backend == "eagle3" else drafter_folder
        session = specstep.eager(str(model_folder), drafter=str(drafter), **options).session

    def reports(moved):
        apart = {"learning": 0}  # the second time drafts as the first
        before, row = session.admit(PROMPTS[0], 100, [], apart), session.admit(PROMPTS[1], 120, [], apart)
        seen = [session.step()[row] for _ in range(2)]
        session.release(before)
        if moved:
            assert session.compact(1) == {1: 0}
            row = 0
        seen += [session.step()[row] for _ in range(3)]
        beside = session.admit(PROMPTS[2], 100, [], apart)  # where it was, or where it is no more
        assert beside == 1 - row
        seen += [session.step()[row] for _ in range(3)]
        for each in (row, beside):
            session.release(each)
        return seen

    expected = reports(moved=False)
    assert len(expected) == 8 and reports(moved=True) == expected
