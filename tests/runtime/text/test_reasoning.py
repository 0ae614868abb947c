"""Tokens of an answer that are reasoning."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import CHANNEL_IDS, tiny_tokenizer
from specstep.runtime.text.channels import CHANNEL, END, MESSAGE, SHOWN, START, Channels
from specstep.runtime.text.reasoning import Reasoning, reasoning_tokens
from specstep.runtime.text.tokenizer import EngineTokenizer

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters="<"), max_size=6)


@pytest.fixture(scope="module")
def text():
    """A token for each byte and for each mark of a channel."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(SHOWN)})
    assert tokenizer.convert_tokens_to_ids(list(CHANNEL_IDS)) == list(CHANNEL_IDS.values())
    return EngineTokenizer(tokenizer.backend_tokenizer, None, {})


@given(thought=WORDS, answer=WORDS, opened=st.booleans())
def test_up_to_the_end_mark(text, thought, answer, opened):
    reasoning = Reasoning("<think>", "</think>", opened)
    begun = ("" if opened else "<think>") + thought
    whole = text.encode_part(begun + "</think>")
    assert reasoning_tokens(text, reasoning, whole + text.encode_part(answer)) == len(whole)
    cut = text.encode_part(begun)
    assert reasoning_tokens(text, reasoning, cut) == len(cut)


def test_an_answer_that_begins_without_reasoning_has_none(text):
    assert reasoning_tokens(text, Reasoning("<think>", "</think>", False), text.encode_part("So <think>")) == 0


@given(messages=st.lists(st.tuples(st.sampled_from(["analysis", "commentary", "final"]), WORDS), max_size=4))
def test_messages_of_the_channel_of_reasoning(text, messages):
    whole, expected = [], 0
    for number, (channel, words) in enumerate(messages):
        start = f"{START}assistant" if number else ""
        written = text.encode_part(f"{start}{CHANNEL}{channel}{MESSAGE}{words}{END}")
        expected += len(written) - bool(start) if channel == "analysis" else 0  # the mark of the start belongs to none
        whole += written
    assert reasoning_tokens(text, Channels(), whole) == expected
