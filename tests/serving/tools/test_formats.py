"""The forms of calls: what is written in one is inside its grammar, and is read as it was written, however it comes.

Other parsers of streams lost arguments where several tokens came at once (vLLM 36360, 38168).
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import validate
from specstep.errors import InputError
from specstep.runtime.calls.formats import FORMATS, HARMONY
from specstep.runtime.calls.python_calls import PythonCalls
from specstep.runtime.calls.tagged_calls import TaggedCalls
from specstep.runtime.calls.tool import Tool
from specstep.runtime.text.channels import CHANNEL
from specstep.serving.tools.answer_reader import AnswerReader
from specstep.serving.tools.grammar import answer_grammar
from tool_forms import ARGUMENTS, NOW, TEXTS, WEATHER, ahead_of, asked, cut, read, said, taken


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_a_written_call_is_in_the_grammar_and_is_read(name, text, matcher, data):
    form, arguments = FORMATS[name], data.draw(ARGUMENTS)
    if isinstance(form, TaggedCalls):  # text as it is, in which a mark is a mark
        arguments["city"] = arguments["city"].replace("<", "")
    written = form.write("get_weather", arguments)
    for required in (True, False):
        grammar = answer_grammar(asked(required=required), form, None, text)
        assert taken(text, matcher, grammar, written) == (written, True)
    reasoning, content, calls = read(AnswerReader(None, asked(), form), cut(data.draw, written))
    assert (reasoning, content) == ("", "")
    [(called, given)] = calls
    assert called == "get_weather" and json.loads(given) == arguments
    validate(json.loads(given), dict(WEATHER.parameters))


@pytest.mark.parametrize("name", FORMATS)
def test_parameters_may_have_names_that_python_has_not(name, text, matcher):
    form, given = FORMATS[name], {"from": "a, b=c", "to-city": "(d"}
    texts = {"type": "object", "properties": {key: {"type": "string"} for key in given}, "required": [*given]}
    tools, written = asked([Tool("route", texts, False)]), form.write("route", given)
    assert taken(text, matcher, answer_grammar(tools, form, None, text), ahead_of(form) + written)[1]
    [(called, read_of)] = read(AnswerReader(None, tools, form), [ahead_of(form) + written])[2]
    assert called == "route" and json.loads(read_of) == given


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if isinstance(form, TaggedCalls)])
def test_choices_of_which_one_is_empty_or_none_hold(name, text, matcher):
    """As they stand, an empty text could not be told from another: such choices are written as JSON."""
    schema = {"type": "object", "properties": {"a": {"type": ["string", "null"], "enum": ["up", "", None]}}}
    form, tools = FORMATS[name], asked([Tool("f", schema, True)])
    grammar = answer_grammar(tools, form, None, text)
    for value, holds in (('"up"', True), ('""', True), ("null", True), ("down", False), ('"down"', False)):
        written = form.write("f", {"a": "VALUE"}).replace("VALUE", value)
        assert taken(text, matcher, grammar, ahead_of(form) + written)[1] == holds, value
        if holds:
            [(_, given)] = read(AnswerReader(None, tools, form), [ahead_of(form) + written])[2]
            assert json.loads(given) == {"a": json.loads(value)}


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form is not HARMONY])
def test_arguments_may_be_said_by_a_definition(name, text, matcher):
    inner = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    schema = {"$ref": "#/$defs/A", "$defs": {"A": inner}}
    form, tools = FORMATS[name], asked([Tool("f", schema, False)])
    grammar = answer_grammar(tools, form, None, text)
    for arguments, holds in (({"a": 3}, True), ({}, False)):
        assert taken(text, matcher, grammar, ahead_of(form) + form.write("f", arguments))[1] == holds


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_is_held_from_its_opening_on(name, text, matcher):
    form = FORMATS[name]
    written = form.write("get_weather", {"city": "x", "days": 3})
    grammar = answer_grammar(asked(), form, None, text)
    ahead = ahead_of(form)
    hello = ahead + said(form, "Hello [] {}")
    assert taken(text, matcher, grammar, hello) == (hello, True)
    bad = written.replace("get_weather", "get_wether")
    got, whole = taken(text, matcher, grammar, ahead + bad)
    assert got.endswith("get_we") and not whole
    got, whole = taken(text, matcher, grammar, ahead + written.replace("3", '"3"'))
    assert not whole and len(got) < len(ahead + written) + 2
    assert taken(text, matcher, answer_grammar(asked(required=True), form, None, text), said(form, "Hello"))[0] in (
        "",
        CHANNEL,
    )
    assert taken(text, matcher, answer_grammar(asked([NOW]), form, None, text), ahead + written)[0] != ahead + written
    none = form.write("now.utc", {})
    assert taken(text, matcher, answer_grammar(asked([NOW]), form, None, text), ahead + none) == (ahead + none, True)
    told = ("Hm.", "Let me see:") if form is HARMONY else ("", ahead.strip())
    assert read(AnswerReader(None, asked(), form), [ahead + none]) == (*told, [("now.utc", "{}")])


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if isinstance(form, TaggedCalls)])
def test_what_a_text_cannot_keep_is_refused_where_it_is_strict(name, text):
    form, schema = FORMATS[name], {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}
    with pytest.raises(InputError, match=r"f: expected a schema .*, got maxLength"):
        answer_grammar(asked([Tool("f", schema, True)]), form, None, text)
    assert answer_grammar(asked([Tool("f", schema, False)]), form, None, text)


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.leads])
def test_text_is_no_call_for_its_first_character(name, text, matcher):
    """Where it is an array or an object, or blanks are ahead of a bracket, it was lost, or could not be."""
    form = FORMATS[name]
    grammar = answer_grammar(asked(), form, None, text)
    for blanks in ("", "\n", " \x1c"):
        for said_of in ("1] See docs", "1, 2]", "]", ""):
            answer = blanks + form.opening[0] + said_of
            assert taken(text, matcher, grammar, answer) == (answer, True)
            for pieces in ([answer], list(answer)):
                assert read(AnswerReader(None, asked(), form), pieces) == ("", answer, [])
    for answer in ('{"a": {"name": 3}}', '{\n "names": []}', '[{"name": "get_weather"}]', "\n\n1. [x] {y}"):
        assert taken(text, matcher, grammar, answer) == (answer, True)
        assert read(AnswerReader(None, asked(), form), list(answer)) == ("", answer, [])
    call = form.write("get_weather", {"city": "x"})
    for answer in (call.replace('"name": ', '"name" :'), call.replace("[", "[ "), " " + call):  # no call, no text
        got, _ = taken(text, matcher, grammar, answer)
        assert answer == call or len(got) <= len(form.opening) + 1


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "harmony"])
def test_no_opening_is_written_in_vain(name, text, matcher):
    """One with words behind it, and the call later, was read as one call (vLLM 53638)."""
    form = FORMATS[name]
    written = ahead_of(form) + form.opening + "well, " + form.write("get_weather", {"city": "x"})
    got, _ = taken(text, matcher, answer_grammar(asked(), form, None, text), written)
    assert len(got) <= len(ahead_of(form) + form.opening) + 1


def two(form):
    """Two calls, one after the other."""
    one, other = form.write("get_weather", {"city": "a"}), form.write("now.utc", {})
    begin, end, between = getattr(form, "begin", ""), getattr(form, "end", ""), getattr(form, "between", ", ")
    begin = begin or (form.opening if not hasattr(form, "before") else "")
    return one.removesuffix(end) + between + other.removeprefix(begin)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("llama3", "harmony")])
@given(data=st.data())
def test_several_calls(name, text, matcher, data):
    form = FORMATS[name]
    written = two(form)
    assert taken(text, matcher, answer_grammar(asked(), form, None, text), written) == (written, True)
    got, whole = taken(text, matcher, answer_grammar(asked(many=False), form, None, text), written)
    assert got != written or not whole
    _, _, calls = read(AnswerReader(None, asked(), form), cut(data.draw, written))
    assert [(name, json.loads(given)) for name, given in calls] == [("get_weather", {"city": "a"}), ("now.utc", {})]


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_text_that_is_no_call_stays(name, data):
    form = FORMATS[name]
    written = data.draw(TEXTS) + form.opening[: data.draw(st.integers(0, len(form.opening) - 1))]
    if form.opening in written or written.lstrip().startswith(("[", "{")):
        return
    assert read(AnswerReader(None, asked(), form), cut(data.draw, said(form, written))) == ("", written, [])


CLOSED = {"type": "object", "additionalProperties": False}
BY_PLACE = {"properties": {"city": {"type": "string"}}, "required": ["city"]}
BY_NUMBER = {"properties": {"code": {"type": "integer"}, "city": {"type": "string"}}, "required": ["code"]}
OPEN = {
    "alternatives": ({**CLOSED, "anyOf": [BY_PLACE, BY_NUMBER]}, [{"city": "x"}, {"code": 3}], [{"code": "x y"}]),
    "all of several": ({**CLOSED, "allOf": [BY_PLACE, BY_NUMBER]}, [{"city": "x", "code": 3}], [{"city": "x"}, {}]),
    "one of definitions": (
        {**CLOSED, "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": BY_PLACE, "B": BY_NUMBER}},
        [{"city": "x"}, {"city": "y", "code": 3}],
        [{"name": "x"}],
    ),
    "others of a kind": (
        {"type": "object", **BY_PLACE, "additionalProperties": {"type": "integer"}},
        [{"city": "x"}, {"city": "x", "a": 1, "b": 2}],
        [{"a": 1}, {"city": "x", "a": "y z"}],
    ),
    "anything": ({"type": "object"}, [{}, {"a": "b c"}, {"a": "b", "c": "d"}], []),
}


@pytest.mark.parametrize("name", [name for name in FORMATS if isinstance(FORMATS[name], TaggedCalls | PythonCalls)])
@pytest.mark.parametrize("case", OPEN)
def test_schemas_that_are_open_or_have_alternatives(name, case, text, matcher):
    """Of which a call had no arguments at all. They were put together, so more is allowed than by some of them."""
    form, (schema, kept, refused) = FORMATS[name], OPEN[case]
    tools = asked([Tool("f", schema, False)])
    grammar = answer_grammar(tools, form, None, text)
    for arguments in kept:
        written = ahead_of(form) + form.write("f", arguments)
        assert taken(text, matcher, grammar, written) == (written, True), arguments
        [(_, given)] = read(AnswerReader(None, tools, form), list(written))[2]
        assert json.loads(given) == arguments
    for arguments in refused:
        written = ahead_of(form) + form.write("f", arguments)
        assert taken(text, matcher, grammar, written)[0] != written, arguments
    if isinstance(form, TaggedCalls) and "Of" in str(schema):
        with pytest.raises(InputError, match=r"f: expected a schema .* got (anyOf|oneOf|allOf)"):
            answer_grammar(asked([Tool("f", schema, True)]), form, None, text)


@pytest.mark.parametrize("place", ["#", "#/$defs/A"])
def test_a_schema_that_refers_to_itself(place):
    """It was followed without end."""
    looped = {"type": "object", "anyOf": [{"$ref": place}, BY_PLACE], "allOf": [{"$ref": place}], "required": ["x"]}
    tool = Tool("f", looped if place == "#" else {"$ref": place, "$defs": {"A": looped}}, False)
    assert tool.properties == BY_PLACE["properties"] and "x" in tool.arguments["required"]


def test_kinds_of_objects_keep_their_choices(text, matcher):
    """Texts as they are, in tags too."""
    kinds = [{"properties": {"kind": {"const": kind, "title": kind}}, "required": ["kind"]} for kind in ("up", "down")]
    tools = asked([Tool("f", {**CLOSED, "oneOf": kinds}, False)])
    form = FORMATS["qwen3-coder"]
    grammar = answer_grammar(tools, form, None, text)
    for kind, holds in (("up", True), ("down", True), ("left", False)):
        written = ahead_of(form) + form.write("f", {"kind": kind})
        assert (taken(text, matcher, grammar, written) == (written, True)) == holds
