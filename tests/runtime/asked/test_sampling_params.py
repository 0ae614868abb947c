"""What may be asked of sampling: checked when it is made, turned into the state of a row, one seed for each choice."""

import dataclasses
import json
import logging
import math
import re

import numpy as np
import pytest
import specstep
from fake_session import FakeSession, alone
from hypothesis import given
from hypothesis import strategies as st
from models import tiny_tokenizer
from specstep import InputError, SamplingParams
from specstep.controls import Sampling
from specstep.runtime.asked.sampling_controls import controls
from specstep.runtime.engine import Engine
from specstep.runtime.text.tokenizer import EngineTokenizer
from tokenizers import Tokenizer, models, pre_tokenizers

TEXT = EngineTokenizer(tiny_tokenizer().backend_tokenizer, None, {})
NAMES = [field.name for field in dataclasses.fields(SamplingParams)]
RANGES = {  # name -> lowest, highest, whether the lowest itself is taken
    "top_p": (0, 1, False),
    "min_p": (0, 1, True),
    "repetition_penalty": (0.01, 100, True),
    "presence_penalty": (-2, 2, True),
    "frequency_penalty": (-2, 2, True),
}
WHOLE = {
    "top_k": (-1, math.inf),
    "min_new_tokens": (0, math.inf),
    "seed": (-(2**128), 2**128),
    "logprobs": (0, 20),
    "n": (1, 128),
}
LIMITS = [
    0,
    -0.0,
    0.0,
    1,
    2,
    -2,
    100,
    20,
    21,
    128,
    129,
    -1,
    2**63,
    2**63 - 1,
    -(2**63) - 1,
    math.inf,
    -math.inf,
    1e-300,
]
numbers = st.one_of(st.sampled_from(LIMITS), st.integers(-200, 200), st.floats(-200, 200), st.floats())
wrong = st.one_of(
    st.just(math.nan), st.booleans(), st.text(max_size=3), st.binary(max_size=2), st.lists(st.integers(), min_size=1),
    st.complex_numbers(), st.dictionaries(st.integers(), st.integers(), min_size=1, max_size=1),
)  # fmt: skip


def made(**fields):
    """The parameters, or the one line that refuses them."""
    try:
        return SamplingParams(**fields)
    except InputError as error:
        [line] = str(error).splitlines()
        return line


@given(st.sampled_from([*RANGES, "temperature"]), numbers)
def test_numbers_are_taken_in_their_range_alone(name, value):
    if name == "temperature":
        right = value == 0 or 0.01 <= value <= 100
    else:
        low, high, closed = RANGES[name]
        right = low <= value <= high and (closed or value != low)
    params = made(**{name: value})
    if right:
        assert getattr(params, name) == value and type(getattr(params, name)) is float
    else:
        assert re.fullmatch(rf"{name}: expected .*, got {re.escape(repr(value))}", params)


@given(st.sampled_from([*WHOLE]), st.one_of(st.integers(), st.sampled_from(LIMITS)))
def test_integers_are_taken_in_their_range_alone(name, value):
    low, high = WHOLE[name]
    params = made(**{name: value})
    if isinstance(value, int) and low <= value <= high:
        assert getattr(params, name) == value
    else:
        assert params.startswith(f"{name}: expected ") and params.endswith(f", got {value!r}")


@given(st.sampled_from([*RANGES, *WHOLE, "temperature"]), wrong)
def test_what_is_no_number_is_refused(name, value):
    assert made(**{name: value}).startswith(f"{name}: expected ")


@given(st.sampled_from(NAMES), st.one_of(wrong, numbers, st.none()))
def test_any_value_is_taken_or_refused_in_one_line(name, value):
    params = made(**{name: value})
    if isinstance(params, str):
        assert params.startswith(name) and ": expected " in params and "got " in params and len(params) < 200
    else:
        assert SamplingParams.of(params.changed) == params == dataclasses.replace(params)
        hash(params)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"temperature": 0.001}, "temperature: expected 0 or a number from 0.01 to 100, got 0.001"),
        ({"temperature": math.nan}, "temperature: expected 0 or a number from 0.01 to 100, got nan"),
        ({"top_p": 0}, "top_p: expected a number above 0 and up to 1, got 0"),
        ({"top_k": 5.0}, "top_k: expected -1 or 0 for all tokens, or an integer of at least 1, got 5.0"),
        ({"top_k": -2}, "top_k: expected -1 or 0 for all tokens, or an integer of at least 1, got -2"),
        ({"seed": True}, "seed: expected an integer of at most 128 bits, got True"),
        ({"logprobs": True}, "logprobs: expected an integer from 0 to 20, got True"),
        ({"n": 0}, "n: expected an integer from 1 to 128, got 0"),
        ({"logit_bias": {5: 101}}, "logit_bias[5]: expected a number from -100 to 100, got 101"),
        ({"logit_bias": {"x": 1}}, "logit_bias: token id: expected an integer of at least 0, got 'x'"),
        ({"logit_bias": {5: 1, "5": 2}}, "logit_bias: expected each token id once, got '5'"),
        ({"logit_bias": [5]}, "logit_bias: expected a mapping of token ids to numbers, got [5]"),
        ({"stop": ""}, "stop[0]: expected a text that is not empty, got ''"),
        ({"stop": ["a", 3]}, "stop[1]: expected a text that is not empty, got 3"),
        ({"stop": ["a"] * 17}, "stop: expected at most 16 texts, got 17"),
        ({"bad_words": "word"}, "bad_words: expected a list of texts, got 'word'"),
        ({"bad_words_ids": [[5], []]}, "bad_words_ids[1]: expected at least one token id, got []"),
        ({"suppress_tokens": [-1]}, "suppress_tokens[0]: expected an integer of at least 0, got -1"),
    ],
)
def test_errors_name_field_range_and_value(fields, error):
    assert made(**fields) == error


def test_values_are_kept_in_one_form():
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(7), logit_bias={"17": 2, 3: np.float64(-1)}, stop="end",
        suppress_tokens=np.array([3, 4]), bad_words_ids=[np.array([1, 2])], seed=-5,
    )  # fmt: skip
    assert (params.temperature, params.top_k, params.logit_bias) == (0.5, 7, {17: 2.0, 3: -1.0})
    assert (params.stop, params.suppress_tokens, params.bad_words_ids) == (("end",), (3, 4), ((1, 2),))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 3
    with pytest.raises(TypeError):
        SamplingParams(0.5)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_tokens", "; here that is the argument max_new_tokens"),
        ("stop_token_ids", "; here that is the argument stop_ids"),
        ("do_sample", "; here that is temperature, 0 for greedy"),
        ("min_tokens", "; here that is min_new_tokens"),
        ("best_of", "; here that is n"),
        ("temprature", ""),
    ],
)
def test_unknown_names_are_refused_and_those_of_others_are_pointed_on(name, hint):
    with pytest.raises(InputError) as caught:
        SamplingParams.of({"temperature": 1, name: 1})
    assert str(caught.value) == f"sampling: expected names out of {', '.join(NAMES)}, got {name!r}{hint}"


def test_null_is_a_value_not_given():
    assert SamplingParams.of(
        json.loads('{"temperature": 0.5, "top_k": null, "logit_bias": {"5": 1}}')
    ) == SamplingParams(temperature=0.5, logit_bias={5: 1})


def asked(text=TEXT, **fields):
    """The controls of a request of four tokens; the session has room for 8 biases and 3 words of 4 tokens."""
    return controls(SamplingParams(**fields), FakeSession(1, vocabulary=258).spec, 4, text)


def test_nothing_is_told_of_what_is_not_asked_for():
    assert asked() == {}
    assert asked(top_k=5, top_p=0.5, min_p=0.1, seed=3) == {}, "greedy, filtered or not"
    off = {"top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    assert asked(temperature=1, **off) == {"sampling": [1.0, *[0] * 6]}
    assert asked(temperature=1, top_k=258) == {"sampling": [1.0, *[0] * 6]}
    assert asked(logit_bias={5: 0}) == {}


def test_the_least_top_p_is_not_off():
    assert np.float32(Sampling(*asked(temperature=1, top_p=1e-300)["sampling"]).top_p) > 0


def test_every_field_reaches_its_tensor():
    found = asked(
        temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, repetition_penalty=1.2, presence_penalty=-1,
        frequency_penalty=2, logit_bias={9: 1.5, 8: -2}, suppress_tokens=[8, 7], min_new_tokens=6, logprobs=0,
        bad_words_ids=[[4], [5, 6]],
    )  # fmt: skip
    assert Sampling(*found["sampling"]) == (0.5, 7, 0.9, 0.1, 1.2, -1, 2)
    assert dict(zip(found["bias_ids"], found["bias"], strict=True)) == {9: 1.5, **dict.fromkeys((8, 7, 4), -math.inf)}
    assert found["banned_words"] == [[-1, -1, 5, 6]]
    assert (found["min_lengths"], found["logprobs"]) == (10, 0)


def test_penalties_hold_for_greedy_rows():
    assert Sampling(*asked(repetition_penalty=2, top_k=4)["sampling"]) == (0, 0, 0, 0, 2, 0, 0)


def test_bad_words_are_banned_with_and_without_a_space_in_front():
    tokens = {piece: at for at, piece in enumerate(["a", "b", "Ġ", "Ġa", "ab", "Ġab"])}
    whole = Tokenizer(models.BPE(vocab=tokens, merges=[("a", "b"), ("Ġ", "a"), ("Ġ", "ab")]))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = EngineTokenizer(whole, None, {})
    assert asked(text, bad_words=["ab"]) == asked(text, bad_words=[" ab"]) == {
        "bias_ids": [4, 5], "bias": [-math.inf] * 2
    }  # fmt: skip
    assert asked(text, bad_words=["aa"])["banned_words"] == [[-1, -1, 0, 0], [-1, -1, 3, 0]]
    once = asked(bad_words=["ab"])["banned_words"]  # of bytes: what ends in the word itself needs no ban of its own
    assert once == [[-1, -1, *TEXT.encode("ab")]]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"logit_bias": {258: 1}}, "logit_bias: expected integers from 0 to 257, got 258"),
        ({"suppress_tokens": [3, 999]}, "suppress_tokens: expected integers from 0 to 257, got 999"),
        ({"bad_words_ids": [[3], [258]]}, "bad_words_ids[1]: expected integers from 0 to 257, got 258"),
        ({"suppress_tokens": range(9)}, "logit_bias, suppress_tokens, bad_words: expected at most 8 tokens, got 9"),
        ({"bad_words": ["ab", "cd", "ef", "gh"]}, "bad_words: expected at most 3 sequences of tokens, got 4"),
        ({"bad_words": ["abcde"]}, "bad_words: expected words of at most 4 tokens, got 5"),
        (
            {"bad_words": ["x"], "text": None},
            "bad_words: expected an engine with a tokenizer, got one without; give bad_",
        ),
    ],
)
def test_more_than_a_row_holds_is_refused(fields, error):
    with pytest.raises(InputError, match=f"^{re.escape(error)}"):
        asked(**fields)


@pytest.fixture
def engine():
    with Engine(FakeSession(2, vocabulary=97), None) as opened:
        yield opened


def sampled(prompt, count, seed):
    """What `FakeSession` writes for a seed."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append((alone(tokens, len(tokens) + 1)[0] + seed) % 97)
    return tokens[len(prompt) :]


def test_the_ith_choice_has_the_seed_plus_i(engine):
    result = engine.generate([5, 6], 9, sampling={"temperature": 1, "seed": 2**63 - 2, "n": 3})
    seeds = [2**63 - 2, 2**63 - 1, 0]
    assert [choice.seed for choice in result.choices] == seeds and len(result.more) == 2
    assert [choice.token_ids for choice in result.choices] == [sampled([5, 6], 9, seed) for seed in seeds]


def test_a_negative_seed_is_told_as_the_one_that_it_counts_as(engine):
    result = engine.generate([5, 6], 9, sampling={"temperature": 1, "seed": -5})
    assert result.seed == 2**63 - 5
    for seed in (2**64 - 5, -(2**64) - 5, 2**127 + 2**63 - 5):
        assert engine.generate([5, 6], 9, sampling={"temperature": 1, "seed": seed}).token_ids == result.token_ids
    assert engine.generate([5, 6], 9, sampling={"temperature": 1, "seed": result.seed}).token_ids == result.token_ids


def test_a_seed_of_minus_one_is_drawn(engine):
    drawn = {engine.generate([5], 1, sampling={"temperature": 1, "seed": -1}).seed for _ in range(3)}
    assert len(drawn) == 3 and all(0 <= seed < 2**48 for seed in drawn)


def test_each_prompt_has_its_own_sampling(engine):
    some = [None, SamplingParams(temperature=1, seed=3), {"temperature": 2, "seed": 4, "n": 2}]
    greedy, one, two = engine.generate([[5], [6], [7]], 6, sampling=some)
    assert (greedy.token_ids, greedy.seed, greedy.logprobs) == (alone([5], 7), None, None)
    assert one.token_ids == sampled([6], 6, 3) and one.more == ()
    assert [choice.token_ids for choice in two.choices] == [sampled([7], 6, seed) for seed in (4, 5)]
    same = engine.generate([[5], [6]], 6, sampling={"temperature": 1, "seed": 8})
    assert [result.seed for result in same] == [8, 8]


def test_a_seed_that_nobody_gave_is_drawn_and_told(engine):
    results = engine.generate([[5]] * 4, 8, sampling={"temperature": 1})
    assert len({result.seed for result in results}) == 4
    for result in results:
        assert result.token_ids == sampled([5], 8, result.seed)
        assert engine.generate([5], 8, sampling={"temperature": 1, "seed": result.seed}).token_ids == result.token_ids


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"sampling": {"n": 2}}, "prompt: n: expected 1 at temperature 0, where all choices are the same, got 2"),
        ({"sampling": {"min_new_tokens": 9}}, "prompt: min_new_tokens: expected at most 8, which fit, got 9"),
        ({"sampling": "hot"}, "sampling: expected SamplingParams, a mapping of its fields, or \"model\", got 'hot'"),
        ({"sampling": [None] * 3}, "sampling: expected one for all prompts, or one for each of 1, got 3"),
        ({"sampling": {"top_p": math.nan}}, "top_p: expected a number above 0 and up to 1, got nan"),
    ],
)
def test_engines_refuse_what_cannot_run(engine, options, error):
    with pytest.raises(InputError, match=f"^{re.escape(error)}$"):
        engine.generate([5], 8, **options)
    assert engine.session.steps == 0


def test_options_beside_sampling_are_refused(engine):
    with pytest.raises(TypeError, match="temperature"):
        engine.generate([5], 8, temperature=0.5)


def test_one_request_is_one_choice(engine):
    many = {"temperature": 1, "n": 2}
    with pytest.raises(InputError, match=r"^prompt: n: expected 1 for one request, got 2; `generate` takes more$"):
        engine.request([5], 8, sampling=many)
    assert len(engine.requests([5], 8, sampling=many)) == 2


def test_the_models_own_is_taken_when_asked_for_and_said_once(caplog):
    session, recommended = FakeSession(1), SamplingParams(temperature=0.5, top_p=0.95)
    with Engine(session, None, recommended) as engine, caplog.at_level(logging.INFO, "specstep"):
        assert engine.recommended == recommended
        engine.generate([5], 3, sampling={"temperature": 0.5})
        assert not caplog.messages
        for _ in range(2):
            assert engine.generate([5], 3).seed is None
        said = 'greedy; the model recommends temperature 0.5, top_p 0.95: sampling="model" takes it'
        assert caplog.messages == [said]
        result = engine.generate([5], 3, sampling="model")
        assert result.token_ids == sampled([5], 3, result.seed)
    with Engine(FakeSession(1), None) as plain:
        assert plain.recommended is None
        assert plain.generate([5], 3, sampling="model").token_ids == alone([5], 4)


def test_a_generation_config_becomes_fields():
    from specstep.compile.source import Source
    from transformers import GenerationConfig

    class Model:
        def __init__(self, **fields):
            self.generation_config = GenerationConfig(**fields)

    def fields(**given):
        return Source("x", Model(**given), None).sampling

    assert fields() == {}
    assert fields(do_sample=False, temperature=0.6, top_p=0.9) == {}
    assert fields(do_sample=True) == {"temperature": 1.0}
    assert fields(do_sample=True, temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.05) == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05,
    }  # fmt: skip
    assert fields(repetition_penalty=1.1) == {"repetition_penalty": 1.1}
    assert Source("x", type("Bare", (), {"generation_config": None})(), None).sampling == {}


def test_public_names():
    assert specstep.SamplingParams is SamplingParams and {"DraftedTree", "TokenLogprobs"} <= set(specstep.__all__)
