"""The forms of calls: what is written in one is inside its grammar, and is read as it was written, however it comes."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import validate
from llguidance import LLMatcher, LLTokenizer
from specstep.runtime.calls.channel_calls import one_call_each
from specstep.runtime.calls.formats import FORMATS, HARMONY, HERMES
from specstep.runtime.calls.tagged_calls import TaggedCalls
from specstep.runtime.calls.tool import Tool, Tools
from specstep.runtime.text.channels import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START
from specstep.runtime.text.reasoning import Reasoning
from specstep.runtime.text.tokenizer import EngineTokenizer, TextStream
from specstep.serving.tools.answer_reader import AnswerReader
from specstep.serving.tools.asked import tools_of
from specstep.serving.tools.custom import input_text
from specstep.serving.tools.grammar import answer_grammar
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MARKS = [START, END, CHANNEL, MESSAGE, CONSTRAIN, CALL, RETURN]
SPECIAL = [
    "<s>", "</s>", "[TOOL_CALLS]", "[ARGS]", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|tool_call|>", "<|tool_call_start|>", "<|python_tag|>", "[THINK]",
    "[/THINK]", *MARKS,
]  # fmt: skip
WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["c", "f"]},
            "rain": {"type": "boolean"},
            "at": {"type": "array", "items": {"type": "number"}},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    True,
)
NOW = Tool("now.utc", {"type": "object", "properties": {}, "additionalProperties": False}, False)
TOOLS = [WEATHER, NOW]
# A special token's name in a text would be encoded as that token, which no grammar takes inside a string.
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12).filter(
    lambda drawn: not any(name in drawn for name in SPECIAL)
)
# In the order of the schema, in which a grammar has them.
ARGUMENTS = st.fixed_dictionaries(
    {"city": TEXTS},
    optional={
        "days": st.integers(-99, 99),
        "unit": st.sampled_from(["c", "f"]),
        "rain": st.booleans(),
        "at": st.lists(st.integers(0, 9), max_size=3),
    },
).map(lambda given: {name: given[name] for name in WEATHER.properties if name in given})


@pytest.fixture(scope="module")
def text():
    """A tokenizer of bytes, in which the marks of some forms are special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return EngineTokenizer(tokenizer, None, {})


@pytest.fixture(scope="module")
def matcher(text):
    end = text.special_names["</s>"]
    tokens = LLTokenizer(text.tokenizer.to_str(), n_vocab=text.tokenizer.get_vocab_size(), eos_token=[end])
    return lambda grammar: LLMatcher(tokens, grammar, log_level=0)


def taken(text, matcher, grammar, written):
    """How much of a text a grammar takes, as text, and whether it may end there."""
    grammar, tokens = matcher(grammar), text.encode_part(written)
    assert not grammar.is_error(), grammar.get_error()
    count = grammar.try_consume_tokens(tokens)
    shown = text.showing(SPECIAL)
    return shown.decode(tokens[:count]), grammar.is_accepting()


def said(form, words):
    """Text of an answer that is no call."""
    return f"{CHANNEL}final{MESSAGE}{words}" if form is HARMONY else words


def ahead_of(form):
    """What may stand ahead of a call."""
    if form is HARMONY:
        between = f"{END}{START}assistant"
        return f"{CHANNEL}analysis{MESSAGE}Hm.{between}{CHANNEL}commentary{MESSAGE}Let me see:{between}"
    return "" if form.leads else "Let me see: "


def asked(tools=TOOLS, many=True, required=False):
    return Tools(tools, many, required, False)


def read(reader, pieces):
    """All that a reader says of pieces of text, put together as a client does."""
    reasoning, content, calls = "", "", []
    grown = [reader.push(piece) for piece in pieces] + [reader.push("", last=True)]
    for each in grown:
        reasoning, content = reasoning + each.reasoning, content + each.content
        for index, new, arguments in each.calls:
            assert (index == len(calls)) == (new is not None), "a name comes once, and first"
            if new is not None:
                calls.append([new[1], ""])
            calls[index][1] += arguments
    return reasoning, content, [tuple(call) for call in calls]


def cut(draw, text):
    """A text in pieces."""
    places = sorted(draw(st.sets(st.integers(0, len(text)), max_size=len(text))) | {0, len(text)})
    return [text[start:end] for start, end in pairwise(places)]


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
    assert taken(text, matcher, answer_grammar(asked([NOW]), form, None, text), ahead + written)[1] is False
    none = form.write("now.utc", {})
    assert taken(text, matcher, answer_grammar(asked([NOW]), form, None, text), ahead + none) == (ahead + none, True)
    told = ("Hm.", "Let me see:") if form is HARMONY else ("", ahead.strip())
    assert read(AnswerReader(None, asked(), form), [ahead + none]) == (*told, [("now.utc", "{}")])


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


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_text_that_is_no_call_stays(name, data):
    form = FORMATS[name]
    written = data.draw(TEXTS) + form.opening[: data.draw(st.integers(0, len(form.opening) - 1))]
    if form.opening in written or written.lstrip().startswith(("[", "{")):
        return
    assert read(AnswerReader(None, asked(), form), cut(data.draw, said(form, written))) == ("", written, [])


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
    held = answer_grammar(asked(), HARMONY, None, text, schema)
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
    assert more[0] == {**thinks, "content": None, "tool_calls": calls[:1]} and more[1] == results[1]
    assert more[2] == {"role": "assistant", "content": None, "tool_calls": calls[1:]} and more[3] == results[0]
    assert one_call_each([{**thinks, "tool_calls": calls[:1]}]) == [
        {**thinks, "content": None, "tool_calls": calls[:1]}
    ]


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
