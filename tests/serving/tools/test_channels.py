"""Answers in channels: held and read, whole, odd or cut."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specstep.runtime.asked.lark import schema_term
from specstep.runtime.calls.channel_calls import one_call_each
from specstep.runtime.calls.formats import HARMONY
from specstep.runtime.text.channels import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START
from specstep.serving.tools.answer_reader import AnswerReader
from specstep.serving.tools.grammar import answer_grammar
from tool_forms import ARGUMENTS, TEXTS, asked, cut, read, said, taken

THOUGHTS = st.lists(TEXTS, max_size=2)


@given(thoughts=THOUGHTS, preambles=THOUGHTS, called=st.sampled_from(["", "channel", "role"]), data=st.data())
def test_channels(thoughts, preambles, called, data, text, matcher):
    """Reasoning, text and calls, in any pieces; all that the grammar takes."""
    heads = [f"{CHANNEL}analysis{MESSAGE}{each}" for each in thoughts]
    heads += [f"{CHANNEL}commentary{MESSAGE}{each}" for each in preambles]
    arguments = data.draw(ARGUMENTS)
    given = json.dumps(arguments, ensure_ascii=False)
    last = said(HARMONY, words := data.draw(TEXTS))
    if called == "channel":
        last = HARMONY.write("get_weather", arguments)
    elif called == "role":
        last = f" to=functions.get_weather{CHANNEL}commentary json{MESSAGE}{given}"
    written = f"{END}{START}assistant".join([*heads, last])
    for required in (True, False):
        got = taken(text, matcher, answer_grammar(asked(required=required), HARMONY, None, text), written)
        assert (got == (written, True)) == bool(called or not required)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    held = answer_grammar(asked(), HARMONY, None, text, schema_term(schema, False))
    assert taken(text, matcher, held, written)[1] == bool(called)
    for head in ("final", f"final {CONSTRAIN}json"):
        document = f"{END}{START}assistant".join([*heads, f'{CHANNEL}{head}{MESSAGE}{{"a": 1}}'])
        assert taken(text, matcher, held, document) == (document, True)
    reasoning, content, calls = read(AnswerReader(None, asked(), HARMONY), cut(data.draw, written))
    assert reasoning == "\n".join(filter(None, thoughts))
    assert content == "\n".join(filter(None, [*preambles, "" if called else words]))
    assert [json.loads(given) for _, given in calls] == ([arguments] if called else [])
    # Nobody asked for calls: what is written of one is text.
    _, content, calls = read(AnswerReader(None, None, HARMONY), cut(data.draw, written))
    assert not calls and content.endswith(given if called else words)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("no channel at all <|chan", ("", "no channel at all <|chan", [])),
        (f"{START}assistant{CHANNEL}final{MESSAGE}Hi{RETURN}", ("", "Hi", [])),
        (f"{CHANNEL}analysis{MESSAGE}Hm", ("Hm", "", [])),
        (f"{CHANNEL}analysis{MESSAGE}Hm{END}{START}assistant{CHANNEL}fin", ("Hm", "", [])),
        (f"{CHANNEL}analysis to=python{MESSAGE}1 + 1{CALL}", ("1 + 1", "", [])),
        (f'{CHANNEL}commentary to=functions.f{MESSAGE}{{"a": ', ("", "", [("f", '{"a": ')])),
    ],
)
def test_channels_that_are_odd_or_cut(written, expected):
    assert read(AnswerReader(None, asked(), HARMONY), [written]) == expected
    assert read(AnswerReader(None, asked(), HARMONY), list(written)) == expected


def test_each_call_is_a_message_where_the_template_writes_one():
    calls = [{"id": id, "type": "function", "function": {"name": id, "arguments": {}}} for id in "ab"]
    results = [{"role": "tool", "tool_call_id": id, "content": id} for id in "bax"]
    thinks = {"role": "assistant", "content": "I do.", "reasoning_content": "Hm.", "tool_calls": calls}
    first, *more = one_call_each([{"role": "user", "content": "u"}, thinks, *results, {"role": "user", "content": "v"}])
    assert first["content"] == "u" and more[-1]["content"] == "v" and more[-2] == results[2]
    first = {**thinks, "content": None, "reasoning_content": "Hm.\nI do.", "tool_calls": calls[:1]}
    assert more[0] == first and more[1] == results[1]
    assert more[2] == {"role": "assistant", "content": None, "tool_calls": calls[1:]} and more[3] == results[0]
    assert one_call_each([{**thinks, "tool_calls": calls[:1]}]) == [first]
