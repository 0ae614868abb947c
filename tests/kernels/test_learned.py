"""The learned table against a dictionary of counts, and what it does when it is full."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specstep.kernels.ngram.learned import CONTEXTS, COUNTS, WAYS, counted, learn_text, remembered


def empty(rows):
    return torch.zeros(rows + 1, WAYS, dtype=torch.int64)


def found(table, *context):
    """What followed a context of one or two tokens, by token."""
    previous, last = (-1, *context)[-2:]
    tokens, counts = remembered(table, torch.tensor([[previous]]), torch.tensor([[last]]))
    kind = len(context) - 1
    pairs = zip(tokens[0, 0, kind].tolist(), counts[0, 0, kind].tolist(), strict=True)
    return {token: count for token, count in pairs if count}


@settings(max_examples=30, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=40), min_size=1, max_size=3),
    most=st.integers(1, 5),
    data=st.data(),
)
def test_it_counts_what_rows_move_by(texts, most, data):
    size = max(map(len, texts))
    history = torch.tensor([text + [9] * (size - len(text)) for text in texts])
    table, ends, expected = empty(4096), [1] * len(texts), Counter()
    while any(end + 1 < len(text) for end, text in zip(ends, texts, strict=True)):
        room = [len(text) - 1 - end for end, text in zip(ends, texts, strict=True)]
        moved = [min(left, data.draw(st.integers(0, most))) for left in room]
        if not any(moved):
            moved = [min(left, 1) for left in room]
        ends = [end + by for end, by in zip(ends, moved, strict=True)]
        learn_text(table, history, torch.tensor(ends), torch.tensor(moved), most)
        # A table's row is written once in a step: of several updates the first row's newest token counts.
        step = [(text[at - n : at], text[at]) for text, end, by in zip(texts, ends, moved, strict=True)
                for at in range(end, end - by, -1) for n in (1, 2) if at >= n]  # fmt: skip
        written = set()
        for context, token in step:
            if tuple(context) not in written:
                expected[*context, token] += 1
            written.add(tuple(context))
    for *context, token in expected:
        assert found(table, *context)[token] == expected[*context, token]
    assert not table[-1].any()
    assert (table % COUNTS).sum() == expected.total()


def test_rows_that_stand_still_and_requests_that_do_not_learn_leave_it_alone():
    table = empty(8)
    learn_text(table, torch.tensor([[1, 2, 3, 4]]), torch.tensor([3]), torch.tensor([0]), 3)
    assert not table.any()


def test_the_rarest_gives_way_and_the_frequent_stays():
    table, history = empty(1), torch.tensor([[1, 2, 0]])
    for _ in range(9):
        learn_text(table, history, torch.tensor([1]), torch.tensor([1]), 1)
    for token in range(10, 90):  # as many contexts as come
        learn_text(table, torch.tensor([[token, token + 1]]), torch.tensor([1]), torch.tensor([1]), 1)
    assert found(table, 1) == {2: 9}
    assert found(table, 89) == {90: 1}
    assert found(table, 11) == {12: 1}  # the others that came first still hold their places
    assert found(table, 60) == {}


def test_a_count_at_its_greatest_halves_its_row():
    held = torch.zeros(1, WAYS, dtype=torch.int64)
    for _ in range(COUNTS - 2):
        held = counted(held, torch.tensor([7]))
    held = counted(held, torch.tensor([8]))
    assert sorted((held % COUNTS).flatten().tolist())[-2:] == [1, COUNTS - 2]
    held = counted(held, torch.tensor([7]))
    assert sorted((held % COUNTS).flatten().tolist())[-2:] == [0, (COUNTS - 1) // 2]


def test_contexts_of_two_need_two():
    table = empty(64)
    learn_text(table, torch.tensor([[5, 6, 7]]), torch.tensor([2]), torch.tensor([2]), 2)
    assert found(table, 5) == {6: 1}
    assert found(table, 5, 6) == {7: 1}
    tokens, counts = remembered(table, torch.tensor([[-1]]), torch.tensor([[6]]))
    assert tokens.shape == counts.shape == (1, 1, CONTEXTS, WAYS)
    assert not counts[0, 0, 1].any()


@pytest.mark.parametrize("rows", [1, 3, 1024])
def test_written_rows_are_inside(rows):
    table = empty(rows)
    history = torch.randint(0, 2**20, (4, 50), generator=torch.Generator().manual_seed(rows))
    for end in range(5, 50, 5):
        learn_text(table, history, torch.full((4,), end), torch.full((4,), 5), 5)
    assert table[:-1].any()
    assert not table[-1].any()
    assert (table >= 0).all()
