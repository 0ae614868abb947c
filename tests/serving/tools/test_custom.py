"""Custom tools: their text is held and read in every form of calls."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specstep.runtime.calls.formats import FORMATS
from specstep.runtime.calls.tagged_calls import TaggedCalls
from specstep.serving.tools.answer_reader import AnswerReader
from specstep.serving.tools.asked import tools_of
from specstep.serving.tools.custom import input_text
from specstep.serving.tools.grammar import answer_grammar
from tool_forms import TEXTS, cut, read, taken


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_a_custom_tool_takes_a_text(name, text, matcher, data):
    form, words = FORMATS[name], data.draw(TEXTS)
    if isinstance(form, TaggedCalls):
        words = words.replace("<", "")
    written = form.write("run", {"input": words})
    tool = tools_of([{"type": "custom", "custom": {"name": "run"}}], "required", None)
    assert taken(text, matcher, answer_grammar(tool, form, None, text), written) == (written, True)
    reader = AnswerReader(None, tool, form)
    assert read(reader, cut(data.draw, written)) == ("", "", [("run", words)])
    assert all(call.custom for call in reader.answer.calls)


@pytest.mark.parametrize(
    ("syntax", "definition", "good", "bad"),
    [
        ("regex", r"[a-z/]+\d|\"\n{2}", ["a/b7", '"\n\n'], ["a/b", "7"]),
        ("lark", 'start: "{" item ("," item)* "}"\nitem: /[0-9]+/', ["{1,23}"], ["{1,}", "1"]),
    ],
)
@pytest.mark.parametrize("name", FORMATS)
def test_the_text_of_a_custom_tool_is_held(syntax, definition, good, bad, name, text, matcher):
    form = FORMATS[name]
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    tools = tools_of([{"type": "custom", "custom": {"name": "run", "format": grammar}}], "required", None)
    if syntax in form.holds:
        held = answer_grammar(tools, form, None, text)
        assert all(taken(text, matcher, held, form.write("run", {"input": each}))[1] for each in good)
        assert not any(taken(text, matcher, held, form.write("run", {"input": each}))[1] for each in bad)
    else:
        assert syntax == "lark" or name in ("lfm2", "pythonic")


@given(words=st.text(max_size=9), escape=st.booleans(), data=st.data())
def test_the_text_of_arguments_grows(words, escape, data):
    arguments = json.dumps({"input": words}, ensure_ascii=escape)
    told = [input_text(arguments[:end]) for end in range(len(arguments) + 1)]
    assert all(after.startswith(before) for before, after in pairwise(told)) and told[-1] == words
    assert input_text('{"input": "a\\ud83d') == "a" and input_text('{"input": "\\ud83dx\\\\ud83d') == "\ufffdx\\ud83d"
