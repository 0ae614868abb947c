"""Steps that begin before the last one is read: each text is what it is without."""

import dataclasses
import random

import numpy as np
import pytest
import specstep
from fake_session import FakeSession, alone
from models import save_eagle3
from specstep.report import CHEAP, NOTHING, WHOLE
from specstep.runtime.engine import Engine
from specstep.runtime.ladder.ladder import Chosen, Ladder


@pytest.fixture
def engine():
    """Two rows that count, on a device that runs beside the host."""
    engine = Engine(FakeSession(2), None)
    engine.session.overlaps = True
    return engine


def watched(session):
    """The number of steps under way, noted whenever one begins. They end in the order in which they began, but for one
    that nobody reads."""
    noted, under_way = [], []
    begin, end = session.begin_step, session.end_step

    def begin_step(*given):
        launched = begin(*given)
        under_way.append(launched)
        noted.append(len(under_way))
        return launched

    def end_step(launched, *given):
        del under_way[: under_way.index(launched) + 1]
        return end(launched, *given)

    session.begin_step, session.end_step = begin_step, end_step
    return noted


def test_the_next_step_begins_before_the_last_one_is_read(engine):
    under_way = watched(engine.session)
    assert engine.generate([5, 6], 30).token_ids == alone([5, 6], 32)
    assert under_way[:2] == [1, 1] and set(under_way[2:]) == {2}, "a row's first step verifies no draft"


def test_it_waits_for_prompts_that_could_have_a_row(engine):
    """Both have their first step at once, and the third one gets the row that is free first."""
    under_way = watched(engine.session)
    results = engine.generate([[5], [6], [7]], 30)
    assert [result.token_ids for result in results] == [alone([start], 31) for start in (5, 6, 7)]
    assert 2 in under_way and 1 in under_way[1:]


def test_it_waits_for_those_who_say_what_may_follow(engine):
    under_way = watched(engine.session)

    def anything(output, tree):
        return np.full((len(tree.tokens), -(-engine.spec.vocab_size // 32)), -1, "int32")

    assert engine.generate([5, 6], 30, allowed_tokens=anything).token_ids == alone([5, 6], 32)
    assert set(under_way) == {1}


def test_a_step_that_fails_with_another_under_way_fails_for_its_rows_alone(engine):
    end, calls = engine.session.end_step, []

    def failing(*given):
        calls.append(given)
        if len(calls) == 3:
            raise RuntimeError("a step that fails")
        return end(*given)

    engine.session.end_step = failing
    with pytest.raises(RuntimeError, match="a step that fails"):
        engine.generate([5, 6], 30)
    assert engine.generate([5, 6], 30).token_ids == alone([5, 6], 32)


def test_catching_up_is_counted_before_the_next_step_begins():
    session = FakeSession(1)
    session.overlaps = session._gaps = True
    session.spec = dataclasses.replace(session.spec, plain=session.spec.step, catch_up=20)
    session.admit([3, 4, 5], 60, [])
    for draft, free in ((WHOLE, False), (WHOLE, True), (NOTHING, True), (CHEAP, False), (WHOLE, False), (WHOLE, True)):
        launched = session.begin_step(0, draft)
        assert session.may_overlap(launched) == free
        session.end_step(launched)


class Fickle(Ladder):
    """Any number of nodes, drafted by anything."""

    def __init__(self, nodes):
        super().__init__([nodes])
        self._most, self._chance = nodes, random.Random(1)

    def choose(self, rows, drafts, length, ahead=False):
        return Chosen(self._chance.randint(0, self._most), self._chance.choice([WHOLE, WHOLE, WHOLE, CHEAP]))


def test_texts_of_a_head_do_not_depend_on_it(model_folder, tmp_path):
    """Greedy and sampled rows that end at any time, with prompts of any length, more of them than rows."""
    shape = {"tree": "dynamic", "nodes": 6, "depth": 3, "top_k": 2}
    sizes = {"dtype": "float32", "max_batch": 3, "max_seq_len": 128, "prefill_chunk": 16}
    plain = specstep.eager(str(model_folder), drafter=str(save_eagle3(tmp_path)), **shape, **sizes)
    session, chance = plain.session, random.Random(0)
    prompts = [[chance.randrange(300) for _ in range(chance.randrange(1, 30))] for _ in range(7)]
    sampling = [specstep.SamplingParams(temperature=place % 2, seed=place) for place in range(len(prompts))]
    expected = [result.token_ids for result in plain.generate(prompts, 40, sampling=sampling, learning=False)]
    session.slots_for = lambda needed: session.spec.most_slots  # as on a GPU, where kernels stop where a row ends
    session.overlaps, under_way = True, watched(session)
    engine = Engine(session, None, learning=False, ladder=Fickle(6))
    assert [result.token_ids for result in engine.generate(prompts, 40, sampling=sampling)] == expected
    assert under_way.count(2) > 9
