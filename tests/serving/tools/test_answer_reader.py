"""Answers with reasoning, answers that are cut, and marks that are special tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specstep.runtime.calls.formats import FORMATS, HERMES
from specstep.runtime.text.reasoning import Reasoning
from specstep.runtime.text.tokenizer import TextStream
from specstep.serving.tools.answer_reader import AnswerReader
from tool_forms import SPECIAL, TEXTS, asked, cut, read

THINK_MARKS = [("<think>", "</think>"), ("[THINK]", "[/THINK]")]


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("marks", THINK_MARKS)
@given(data=st.data())
def test_reasoning_comes_first_and_may_speak_of_calls(marks, opened, text, data):
    """What is thought is free: a call in it is none."""
    thought = data.draw(TEXTS) + "<tool_call>\n{" + data.draw(TEXTS)
    call = HERMES.write("now.utc", {})
    written = ("" if opened else marks[0]) + thought + marks[1] + "\n\nSo: " + call
    reader = AnswerReader(Reasoning(*marks, opened), asked(), HERMES)
    assert read(reader, cut(data.draw, written)) == (thought.strip(), "So:", [("now.utc", "{}")])
    reader = AnswerReader(Reasoning(*marks, opened), None, HERMES)
    assert read(reader, cut(data.draw, written)) == (thought.strip(), "So: " + call, [])


def test_an_answer_without_reasoning_where_it_may_begin():
    for written in ("<thin", "Hello <think>", "", " <b>"):
        reader = AnswerReader(Reasoning("<think>", "</think>", False), asked(), HERMES)
        assert read(reader, list(written)) == ("", written, [])
    cut_off = AnswerReader(Reasoning("<think>", "</think>", True), asked(), HERMES)
    assert read(cut_off, ["I thi", "nk </th"]) == ("I think </th", "", [])


def test_an_answer_that_is_cut_gives_what_it_has():
    written = HERMES.write("get_weather", {"city": "Paris"})
    for length in range(len(written)):
        reasoning, content, calls = read(AnswerReader(None, asked(), HERMES), list(written[:length]))
        assert reasoning == "" and (content == "" or HERMES.opening.startswith(content))
        assert all('{"city": "Paris"}'.startswith(given) for _, given in calls)


def test_marks_that_are_special_tokens_show(text):
    written = FORMATS["deepseek-v3.1"].write("now.utc", {})
    tokens = text.encode_part(written)
    assert TextStream(text).push(tokens, last=True) == "now.utc{}"
    shown = text.showing(SPECIAL[2:])
    assert "".join(TextStream(shown).push([token]) for token in tokens) == written
    assert shown.decode([text.special_names["</s>"]]) == "" and text.showing(["none"]) is text
