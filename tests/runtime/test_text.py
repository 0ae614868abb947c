"""Text in and out, and streaming that never cuts a character."""

import pytest
import specstep
from hypothesis import given
from hypothesis import strategies as st
from models import tiny_tokenizer
from specstep.runtime.text import Text, TextStream

TOKENIZER = tiny_tokenizer()
TEXT = Text(TOKENIZER.backend_tokenizer, TOKENIZER.chat_template, {"bos_token": "<s>"})


@given(st.text(max_size=30), st.lists(st.integers(1, 5), max_size=40))
def test_pieces_are_whole_characters_and_add_up(text, sizes):
    tokens = TEXT.encode(text, chat=False)
    stream, pieces, start = TextStream(TEXT), [], 0
    for size in sizes:
        pieces.append(stream.push(tokens[start : start + size]))
        start += size
    pieces.append(stream.push(tokens[start:], last=True))
    assert "".join(pieces) == text
    for piece in pieces:
        assert "\ufffd" not in piece or "\ufffd" in text


def test_broken_utf8_at_the_end_is_shown_not_lost():
    stream = TextStream(TEXT)
    euro = TEXT.encode("€", chat=False)
    assert stream.push(euro[:2]) == ""
    assert stream.push([], last=True) == "\ufffd"


def test_chat_template_renders_and_refuses():
    assert TEXT.render([{"role": "user", "content": "hi"}]) == "<s>user: hi\nbot:"
    assert TEXT.encode("hi", chat=True)[0] == 0
    with pytest.raises(specstep.InputError, match="without; use a raw prompt"):
        Text(TOKENIZER.backend_tokenizer, None, {}).encode("hi", chat=True)
    picky = Text(TOKENIZER.backend_tokenizer, "{{ raise_exception('no system turn') }}", {})
    with pytest.raises(specstep.InputError, match="no system turn"):
        picky.encode("hi", chat=True)


def test_template_equals_transformers():
    messages = [{"role": "user", "content": "hi\n there"}, {"role": "assistant", "content": "yes"}]
    expected = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert TEXT.render(messages) == expected
