"""What users may give as a prompt, and what is said of what they may not."""

import numpy as np
import pytest
import torch
from fake_session import VOCABULARY, FakeSession, alone
from specstep.errors import InputError
from specstep.runtime.engine import Engine


@pytest.fixture(scope="module")
def engine():
    return Engine(FakeSession(2), None)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda ids: np.array(ids, np.int32)])
def test_token_ids_of_any_kind(kind, engine):
    assert engine.generate(kind([5, 6, 7]), 6).token_ids == alone([5, 6, 7], 9)
    assert engine.generate([np.int64(5), np.int64(6)], 4).token_ids == alone([5, 6], 6)
    both = engine.generate([kind([5, 6]), kind([7])], 5)
    assert [result.token_ids for result in both] == [alone([5, 6], 7), alone([7], 6)]


def test_matrices_are_batches(engine):
    for matrix in (np.array([[5, 6], [7, 8]]), torch.tensor([[5, 6], [7, 8]])):
        assert [result.token_ids for result in engine.generate(matrix, 3)] == [alone([5, 6], 5), alone([7, 8], 5)]


def test_no_prompts_are_no_results(engine):
    assert engine.generate([], 5) == []


def test_stop_ids_may_be_an_array(engine):
    expected = alone([5, 6], 20)
    stop = expected[4]
    result = engine.generate([5, 6], 18, stop_ids=np.array([stop, stop]))
    assert result.token_ids == expected[: expected.index(stop) + 1] and result.finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt 0: expected at least one token, got an empty prompt"),
        ([5, "a"], {}, r"prompt: token_ids: expected integers from 0 to 96, got 'a'"),
        ([5, 1.5], {}, r"prompt: token_ids: expected integers from 0 to 96, got 1.5"),
        ([5, VOCABULARY], {}, r"prompt: token_ids: expected integers from 0 to 96, got 97"),
        ([[5], [-1]], {}, r"prompt 1: token_ids: expected integers from 0 to 96, got -1"),
        (np.array([0.5]), {}, r"prompt: token_ids: expected integers from 0 to 96, got 0.5"),
        ("text", {}, "engine: expected one with a tokenizer for text and messages, got one without; give token ids"),
        (5, {}, "prompts: expected text, token ids, messages, or a list of these, got int"),
        (None, {}, "prompts: expected text, token ids, messages, or a list of these, got NoneType"),
        ([5], {"stop_ids": ["a"]}, "stop_ids: expected integers from 0 to 96, got 'a'"),
        ([5], {"stop_ids": "ab"}, "stop_ids: expected a list of integers, got str"),
        ([5], {"stop_ids": range(20)}, "stop_ids: expected at most 16 stop tokens, got 20"),
        ([5], {"max_new_tokens": 0}, "max_new_tokens: expected an integer of at least 1, got 0"),
        ([5], {"max_new_tokens": 2.5}, "max_new_tokens: expected an integer of at least 1, got 2.5"),
        ([5], {"max_new_tokens": True}, "max_new_tokens: expected an integer of at least 1, got True"),
        ([5] * 100, {}, r"prompt: expected at most 99 tokens \(max_seq_len 100\), got 100; shorten it"),
    ],
)
def test_mistakes_are_found_before_anything_runs(prompt, options, message, engine):
    if message.startswith("prompt 0"):
        prompt = [prompt]
    before = engine.session.steps
    with pytest.raises(InputError, match=message):
        engine.generate(prompt, **options)
    assert engine.session.steps == before and engine.session.free_rows == 2
