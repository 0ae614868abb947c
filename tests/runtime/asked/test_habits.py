"""What is likely at places of documents, against counts."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from specstep.runtime.asked import habits as module
from specstep.runtime.asked.habits import FEW, Habits
from specstep.runtime.asked.node_mask import NodeMask

MASKS = [NodeMask(np.array([word, 0], np.uint32)) for word in range(3)]
BEHIND = st.lists(st.integers(0, 2), max_size=3).map(tuple)
SEEN = st.lists(st.tuples(st.integers(0, 2), BEHIND, st.integers(0, FEW - 1)), max_size=60)


@given(seen=SEEN, asked=st.lists(BEHIND, min_size=1, max_size=20))
def test_the_likely_token_outweighs_all_others(seen, asked):
    """Behind the same two tokens, else behind the same one, else wherever the mask is the same."""
    habits = Habits()
    for mask, behind, token in seen:
        habits.learn(MASKS[mask], behind, token)
    for mask in range(3):
        for behind in [*asked, *(ahead for _, ahead, _ in seen)]:
            widths = range(min(2, len(behind)), -1, -1)
            known = [
                Counter(its for other, ahead, its in seen if (other, last(ahead, n)) == (mask, last(behind, n)))
                for n in widths
            ]
            expected = next(filter(lambda each: each is not None, map(majority, known)), None)
            assert Habits.likely(habits, NodeMask(MASKS[mask].bits.copy()), behind) == expected


def last(behind, count):
    """None where there are fewer."""
    return behind[len(behind) - count :] if count <= len(behind) else None


def majority(counts):
    return next((token for token, count in counts.items() if 2 * count > counts.total()), None)


def test_few_places_and_tokens_are_kept(monkeypatch):
    monkeypatch.setattr(module, "MOST", 4)
    habits = Habits()
    for token in range(100):
        habits.learn(MASKS[0], [7], token)
    assert max(map(len, habits._counts.values())) == FEW + 1
    habits.learn(MASKS[0], [8], 3)
    assert habits.likely(MASKS[0], [7]) is None, "all others are counted together"
    for behind in range(10):
        habits.learn(MASKS[1], [behind], 5)
    assert len(habits._counts) == 4
    assert habits.likely(MASKS[1], [9]) == 5 and habits.likely(MASKS[0], [7]) is None


def test_what_is_written_within_a_text_is_not_counted():
    bits = np.full(8, 0xFFFFFFFF, np.uint32)
    habits, text = Habits(), NodeMask(bits)
    habits.learn(text, [1], 2)
    assert not habits._counts and habits.likely(text, [1]) is None
    bits[4:] = 0
    text = NodeMask(bits)
    habits.learn(text, [1], 2)
    assert habits.likely(text, [1]) == 2
