"""What is likely at places of documents, against counts."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from specstep.runtime.asked import habits as module
from specstep.runtime.asked.habits import FEW, Habits

MASKS = [np.array([word, 0], np.uint32) for word in range(3)]
SEEN = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, FEW - 1)), max_size=60)


@given(seen=SEEN)
def test_the_likely_token_outweighs_all_others(seen):
    """Behind the same token, else wherever the mask is the same."""
    habits = Habits()
    for mask, behind, token in seen:
        habits.learn(MASKS[mask], behind, token)
    for mask in range(3):
        for behind in range(4):
            narrow = Counter(token for other, ahead, token in seen if (other, ahead) == (mask, behind))
            wide = Counter(token for other, _, token in seen if other == mask)
            expected = next(filter(lambda each: each is not None, map(majority, (narrow, wide))), None)
            assert Habits.likely(habits, MASKS[mask].copy(), behind) == expected


def majority(counts):
    return next((token for token, count in counts.items() if 2 * count > counts.total()), None)


def test_few_places_and_tokens_are_kept(monkeypatch):
    monkeypatch.setattr(module, "MOST", 4)
    habits = Habits()
    for token in range(100):
        habits.learn(MASKS[0], 7, token)
    assert max(map(len, habits._counts.values())) == FEW + 1
    habits.learn(MASKS[0], 8, 3)
    assert habits.likely(MASKS[0], 7) is None, "all others are counted together"
    for behind in range(10):
        habits.learn(MASKS[1], behind, 5)
    assert len(habits._counts) == 4
    assert habits.likely(MASKS[1], 9) == 5 and habits.likely(MASKS[0], 7) is None


def test_what_is_written_within_a_text_is_not_counted():
    habits, text = Habits(), np.full(8, 0xFFFFFFFF, np.uint32)
    habits.learn(text, 1, 2)
    assert not habits._counts and habits.likely(text, 1) is None
    text[4:] = 0
    habits.learn(text, 1, 2)
    assert habits.likely(text, 1) == 2
