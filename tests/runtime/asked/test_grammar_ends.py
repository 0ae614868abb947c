"""What else is asked beside a grammar: the cells of the table in docs/sampling.md, one by one."""

import re
from pathlib import Path

import pytest
import specstep
from fake_session import FakeSession
from models import tiny_tokenizer, token_of
from specstep import InputError
from specstep.runtime.engine import Engine
from specstep.runtime.text.tokenizer import EngineTokenizer

DOCS = Path(__file__).parents[3] / "docs" / "sampling.md"
TEXT = EngineTokenizer(tiny_tokenizer().backend_tokenizer, None, {})
EOS, PROMPT, MOST = 1, [9], 12
END = "</s>"  # the token, in what follows
DRAFTS = {"no draft": lambda *_: 0, "some": None, "every draft": lambda *_: 2}
AB, ANY, AA = {"regex": "a{3}b*"}, {"regex": "[abc]{3}[bc]*"}, {"choice": ["aa"]}


def likes(text):
    """A model that would say a text, and end."""
    tokens = [*map(token_of, text), EOS]
    return lambda written: tokens[min(len(written) - len(PROMPT), len(tokens) - 1)]


def said(text, sampling, accepts=None, most=MOST, **options):
    """What it says instead: its tokens as text, and the output."""
    session = FakeSession(1, follow=likes(text), accepts=accepts, vocabulary=258, stops=(EOS,))
    with Engine(session, TEXT) as engine:
        result = engine.generate(PROMPT, most, sampling=sampling, **options)
    return "".join(END if token == EOS else TEXT.decode([token]) for token in result.token_ids), result


ENDS = {
    "end-of-sequence tokens, `stop_ids`": [
        ("", AB, {}, {}, "aaa</s>", "stop"),  # not ahead of where the grammar may end
        ("aaabb", AB, {}, {}, "aaabb</s>", "stop"),  # there as the model likes
        ("acabc", ANY, {}, {"stop_ids": [token_of("c")]}, "aaabc", "stop"),
        ("acabc", ANY, {}, {}, "acabc</s>", "stop"),  # of no other request
        ("acab", ANY, {}, {"stop_ids": [token_of("c")]}, "aaab</s>", "stop"),
    ],
    "`min_new_tokens`": [
        ("aaab", AB, {"min_new_tokens": 6}, {}, "aaabbb</s>", "stop"),
        ("aaab", AB, {"min_new_tokens": 4}, {}, "aaab</s>", "stop"),
        ("aa", AA, {"min_new_tokens": 9}, {}, "aa</s>", "stop"),  # nothing else may follow (vLLM 47489)
        ("acaccc", ANY, {"min_new_tokens": 5}, {"stop_ids": [token_of("c")]}, "aaabbc", "stop"),
    ],
    "`max_new_tokens`": [
        ("aaabbb", AB, {}, {"most": 4}, "aaab", "length"),
        ("aaabbb", AB, {}, {"most": 2}, "aa", "length"),
        ("aa", AA, {}, {"most": 2}, "aa", "length"),  # whole, and its end is not written
        ("aa", AA, {}, {"most": 3}, "aa</s>", "stop"),
    ],
    "`ignore_eos`": [
        ("aaab", AB, {}, {"ignore_eos": True}, "aaab" + 8 * "b", "length"),
        ("aa", AA, {}, {"ignore_eos": True}, "aa</s>", "stop"),  # it does not go on
    ],
    "`stop`": [
        ("aaabbbb", AB, {"stop": ["bb"]}, {}, "aaabb", "stop"),
        ("aaabbbb", AB, {"stop": ["aab", "bb"]}, {}, "aaab", "stop"),
        ("aaa", AB, {"stop": ["aa"]}, {}, "aa", "stop"),  # where the grammar may not end, too
        ("aaabbbbb", AB, {"stop": ["bb"], "min_new_tokens": 6}, {}, "aaabbbb", "stop"),
        ("aaab", AB, {"stop": ["bb"]}, {"ignore_eos": True}, "aaabb", "stop"),
    ],
}
CASES = [(name, *case) for name, cases in ENDS.items() for case in cases]


@pytest.mark.parametrize("accepts", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize(("name", "text", "structured", "sampling", "options", "expected", "reason"), CASES)
def test_how_an_output_ends(name, text, structured, sampling, options, expected, reason, accepts):
    tokens, result = said(text, {**sampling, "structured": structured}, accepts, **options)
    assert (tokens, result.finish_reason) == (expected, reason)


def test_a_stop_string_cuts_as_without_a_grammar():
    for sampling in ({"stop": ["bb"]}, {"stop": ["bb"], "min_new_tokens": 6}, {"stop": ["ab", "aab"]}):
        _, held = said("aaabbbbbb", {**sampling, "structured": AB})
        _, free = said("aaabbbbbb", sampling)
        assert (held.text, held.token_ids, held.finish_reason) == (free.text, free.token_ids, "stop")


@pytest.fixture(scope="module")
def engine(model_folder):
    with specstep.eager(str(model_folder), drafter="ngram", dtype="float32", max_seq_len=64) as opened:
        opened.learning = False
        yield opened


LETTERS = {"structured": {"regex": "[ab]{8}"}}


@pytest.mark.parametrize("liked", "ab")
def test_a_bias_chooses_among_what_is_allowed(liked, engine):
    other = {token_of("c"): 100.0, EOS: 100.0}
    biased = LETTERS | {"logit_bias": {token_of(liked): 50.0, **other}}
    assert engine.generate(PROMPT, 20, sampling=biased).text == 8 * liked
    unbiased = engine.generate(PROMPT, 20, sampling=LETTERS).token_ids
    assert engine.generate(PROMPT, 20, sampling=LETTERS | {"logit_bias": other}).token_ids == unbiased


@pytest.mark.parametrize("penalty", [{"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 50}])
def test_a_penalty_chooses_among_what_is_allowed(penalty, engine):
    """What was said gives way, within the grammar, and to its end: no penalty makes it leave it."""
    biased = LETTERS | {"logit_bias": {token_of("a"): 1.5}}
    assert engine.generate(PROMPT, 20, sampling=biased).text == 8 * "a"
    result = engine.generate(PROMPT, 20, sampling=biased | penalty)
    assert re.fullmatch("a[ab]*b[ab]*", result.text) and len(result.text) == 8 and result.finish_reason == "stop"


BANS = {"suppress_tokens": [5], "bad_words": ["b"], "bad_words_ids": [[5, 6]]}


@pytest.mark.parametrize("name", BANS)
def test_bans_are_refused(name):
    with pytest.raises(InputError, match=f"{name}: expected none beside structured"):
        said("aaa", {"structured": AB, name: BANS[name]})


def test_masks_of_the_callers_are_refused():
    with pytest.raises(InputError, match="structured: expected none beside allowed_tokens"):
        said("aaa", {"structured": AB}, allowed_tokens=lambda output, tree: None)


def test_the_table_has_these_cells_and_no_others():
    table = DOCS.read_text().split("| beside a grammar | |\n|---|---|\n")[1].split("\n\n")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines()]
    bans = ", ".join(f"`{name}`" for name in BANS)
    assert rows == [*ENDS, "`logit_bias`, penalties", bans, "`allowed_tokens`"]
