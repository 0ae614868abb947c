"""What a request says of its answer: what may be given, what is refused, and how much of it the answer has."""

import random

import numpy as np
import pytest
import torch
from fake_session import FakeSession
from specstep.errors import InputError
from specstep.kernels.ngram.reference import follow_prediction
from specstep.runtime.asked.prediction import LONGEST, FollowedPrediction
from specstep.runtime.engine import Engine


@pytest.fixture(scope="module")
def engine():
    with Engine(FakeSession(2), None) as engine:
        yield engine


def told(request):
    return {name: values for name, values in request.controls.items() if name.startswith("prediction")}


def test_a_prediction_reaches_its_row(engine):
    for given in ([3, 4, 5], np.array([3, 4, 5]), torch.tensor([3, 4, 5])):
        request = engine.request([1, 2], 4, prediction=given)
        assert told(request) == {"prediction": [3, 4, 5], "prediction_lengths": 3}
    row = engine.session.begin([1, 2], 6, [], request.controls)
    try:
        assert engine.session.state["prediction"][row, :5].tolist() == [3, 4, 5, -1, -1]
        assert engine.session.state["prediction_lengths"][row] == 3
    finally:
        engine.session.release(row)
    assert engine.session.state["prediction_lengths"][row] == 0


@pytest.mark.parametrize("given", [None, [], ""])
def test_nothing_predicted_asks_for_nothing(engine, given):
    request = engine.request([1, 2], 4, **({} if given == "" else {"prediction": given}))
    assert told(request) == {} and request.predicted is None and request.prediction_counts == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([97], "prompt: prediction: expected integers from 0 to 96, got 97"),
        ({"content": "x"}, "prompt: prediction: expected text or token ids, got dict"),
        ([1] * 101, r"prompt: prediction: expected at most 100 tokens \(max_seq_len\), got 101; give the part"),
        ("text", "prompt: prediction: expected an engine with a tokenizer, got none; give token ids"),
    ],
)
def test_what_no_row_can_hold_is_refused(engine, given, message):
    with pytest.raises(InputError, match=message):
        engine.generate([1, 2], 4, prediction=given)


def test_several_prompts_have_one_each(engine):
    plain = [result.token_ids for result in engine.generate([[1], [2], [3]], 6)]
    counts = ("accepted_prediction_tokens", "rejected_prediction_tokens")
    each = engine.generate([[1], [2], [3]], 6, prediction=[plain[0], None, plain[0]])
    assert [result.token_ids for result in each] == plain
    assert [each[0].stats[name] for name in counts] == [6, 0]
    assert counts[0] not in each[1].stats and counts[0] in each[2].stats
    same = engine.generate([[1], [2]], 6, prediction=plain[0])
    assert same[0].stats[counts[0]] == 6
    with pytest.raises(InputError, match="prediction: expected one for all prompts, or one for each of 3, got 2"):
        engine.generate([[1], [2], [3]], 6, prediction=[[1], [2]])


def test_a_longer_prediction_than_its_row_is_searched_as_a_whole():
    session = FakeSession(2)
    row = session.admit([1, 2, 3], 20, [], {"prediction": [4] * 90, "prediction_lengths": 90})
    assert session.next_size() == (1, 128)
    session.release(row)
    session.admit([1, 2, 3], 20, [])
    assert session.next_size() == (1, 64)


def test_a_row_that_moves_takes_its_prediction_along():
    session = FakeSession(2)
    session.admit([1], 20, [])
    session.admit([1, 2, 3], 20, [], {"prediction": [4] * 90, "prediction_lengths": 90})
    session.release(0)
    assert session.compact(1) == {1: 0} and session.next_size() == (1, 128)
    assert session.state["prediction"][0, :91].tolist() == [4] * 90 + [-1]


def test_an_answer_is_followed_as_by_the_drafter():
    generator = random.Random(3)
    for _ in range(30):
        tokens = [generator.randrange(4) for _ in range(generator.randrange(1, 30))]
        answer = [generator.randrange(4) for _ in range(20)]
        followed, place, found = FollowedPrediction(tokens), 0, set()
        for end, token in enumerate(answer, 1):
            if place < len(tokens) and tokens[place] == token:
                found.add(place)
            followed.push([token])
            context = [-2] * LONGEST + answer[:end]
            places, *_ = follow_prediction(
                torch.tensor([tokens]), torch.tensor([len(tokens)]), torch.tensor([[context[-LONGEST:]]]),
                torch.tensor([[place + 1]]), torch.ones(LONGEST + 1),
            )  # fmt: skip
            place = int(places)
        assert (followed.accepted, followed.rejected) == (len(found), len(tokens) - len(found))


def test_an_edit_costs_the_tokens_that_it_replaces():
    tokens = list(range(40))
    followed = FollowedPrediction(tokens)
    followed.push([*tokens[:10], 90, 91, *tokens[12:20], *tokens[25:]])
    assert followed.rejected == 2 + 6  # the first behind a gap is not expected
