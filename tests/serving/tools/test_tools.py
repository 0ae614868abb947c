"""Tools as OpenAI's client asks for them, against an engine whose answers are held by their grammar."""

import json
import re

import openai
import pytest
import specstep
from jsonschema import validate
from models import save_model, tiny_tokenizer
from served import PATIENCE, joined, running, user
from specstep.runtime.calls.formats import HERMES
from specstep.runtime.text.token_text import TokenText
from specstep.serving.app import create_app
from specstep.serving.options import ServeOptions
from specstep.serving.tools.conversation import told

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "unit": {"enum": ["c", "f"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "of a city", "parameters": PARAMETERS},
}
ODD = {"properties": {}, "unevaluatedItems": False}
NOW = {"type": "function", "function": {"name": "now"}}
WORDS = told(HERMES, [NOW])


def custom_tool(form):
    return {"type": "custom", "custom": {"name": "run", **({"format": form} if form else {})}}


def grammar(syntax, definition):
    return {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}


NAMED = {"type": "function", "function": {"name": "get_weather"}}
ASKED = {"model": "tiny", "messages": user("hello"), "max_tokens": 200, "temperature": 1.0, "seed": 3}
# A model that thinks, and that is shown its tools.
THINKS = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.role }}: "
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "\n<tool_call>\n{\"name\": \"{{ c.function.name }}\", \"arguments\": "
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}\n{% endfor %}bot:{% if think %}<think>\n{% else %}"
    "<think></think>{% endif %}"
)  # fmt: skip


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """One whose template knows no tools, and one that thinks and is shown them."""
    options = {"drafter": "ngram", "dtype": "float32", "max_batch": 2, "max_seq_len": 1536, "prefill_chunk": 64}
    folders = [tmp_path_factory.mktemp(name) for name in ("plain", "thinks")]
    for folder in folders:
        save_model(folder, tokenizer=True, max_position_embeddings=2048)
    thinks = tiny_tokenizer()
    thinks.chat_template = THINKS
    thinks.save_pretrained(folders[1])
    with specstep.eager(str(folders[0]), **options) as plain, specstep.eager(str(folders[1]), **options) as other:
        plain.learning = other.learning = False
        yield {"tiny": plain, "thinks": other}


@pytest.fixture(scope="module")
def client(engines):
    with running(create_app(engines)) as url, openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
    ) as client:  # fmt: skip
        yield client


def check(call):
    assert call.type == "function" and call.id.isalnum() and len(call.id) == 9
    arguments = json.loads(call.function.arguments)
    if call.function.name == "now":
        assert arguments == {}
    else:
        assert call.function.name == "get_weather"
        validate(arguments, PARAMETERS)


@pytest.mark.parametrize("model", ["tiny", "thinks"])
def test_tokenize_shows_tools_as_a_chat_does(model, client):
    asked = {"model": model, "messages": user("hello"), "tools": [WEATHER, NOW]}
    counts = []
    for more in ({}, {"tools": [NOW]}, {"tools": []}):
        got = client.post("../tokenize", body=asked | more, cast_to=object)
        usage = client.chat.completions.create(**asked | more, max_tokens=1).usage
        assert got["count"] == len(got["tokens"]) == usage.prompt_tokens
        counts.append(got["count"])
    assert counts[0] > counts[1] > counts[2]


@pytest.mark.parametrize("model", ["tiny", "thinks"])
@pytest.mark.parametrize(
    ("choice", "reason", "names"),
    [
        ("required", "tool_calls", {"get_weather", "now"}),
        (NAMED, "stop", {"get_weather"}),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOW]}},
            "tool_calls",
            {"now"},
        ),
    ],
)
def test_a_call_that_must_be_made(model, choice, reason, names, client):
    asked = ASKED | {"model": model, "tools": [WEATHER, NOW], "tool_choice": choice, "parallel_tool_calls": False}
    for seed in range(3):
        got = client.chat.completions.create(**asked | {"seed": seed}).choices[0]
        assert got.finish_reason == reason and got.message.content is None
        [call] = got.message.tool_calls
        check(call)
        assert call.function.name in names
        told = (None, [(call.function.name, call.function.arguments)], reason)
        assert joined(client.chat.completions.create(**asked | {"seed": seed}, stream=True)) == told


def test_a_call_that_a_stop_string_cuts_is_not_to_be_run(client):
    asked = ASKED | {"tools": [WEATHER], "tool_choice": "required"}
    for stop, reason, whole in (("city", "stop", False), ("</tool_call>", "tool_calls", True)):
        [got] = client.chat.completions.create(**asked, stop=stop).choices
        arguments = got.message.tool_calls[0].function.arguments
        assert got.finish_reason == reason and arguments.endswith("}") == whole
        with client.chat.completions.create(**asked, stop=stop, stream=True) as chunks:
            assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == reason
    custom = ASKED | {"tools": [custom_tool(grammar("regex", "[ab]{4}x[ab]{4}"))], "tool_choice": "required"}
    for stop, reason, size in (("x", "stop", 4), (None, "tool_calls", 9)):
        [got] = client.chat.completions.create(**custom, parallel_tool_calls=False, stop=stop).choices
        assert got.finish_reason == reason and len(got.message.tool_calls[0].custom.input) == size


def test_several_calls_and_several_choices(client):
    asked = ASKED | {"tools": [WEATHER, NOW], "tool_choice": "required", "n": 2, "max_tokens": 400}
    for choice in client.chat.completions.create(**asked).choices:
        assert choice.message.tool_calls
        for call in choice.message.tool_calls[: None if choice.finish_reason == "tool_calls" else -1]:
            check(call)


def test_a_call_that_may_be_made(client):
    """A model that makes none says text."""
    asked = ASKED | {"tools": [NOW], "max_tokens": 40}
    got = client.chat.completions.create(**asked).choices[0]
    assert got.message.tool_calls is None and got.message.content and got.finish_reason in ("stop", "length")
    assert client.chat.completions.create(**asked, tool_choice="auto").choices[0].message.content == got.message.content
    content, calls, reason = joined(client.chat.completions.create(**asked, stream=True))
    assert (content, calls, reason) == (got.message.content, [], got.finish_reason)


def test_what_a_conversation_had_goes_to_the_model(client, engines):
    """Calls and results of earlier turns, and the tools, in a template that knows none of them."""
    made = client.chat.completions.create(**ASKED, tools=[NOW], tool_choice="required", parallel_tool_calls=False)
    message = made.choices[0].message
    [call] = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "noon"}
    asked = ASKED | {"messages": [*user("hello"), message.model_dump(exclude_none=True), result], "tools": [NOW]}
    told = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False)
    check(told.choices[0].message.tool_calls[0])
    text = engines["tiny"].tokenizer
    shown = text.encode_messages(
        [
            {"role": "system", "content": WORDS},
            *user("hello"),
            {"role": "assistant", "content": HERMES.write("now", {})},
            {"role": "user", "content": "<tool_response>\nnoon\n</tool_response>"},
        ]
    )
    assert told.usage.prompt_tokens == len(shown)
    # So do they where the tools are gone, or may not be called; results that follow one another are one turn.
    calls = [call.model_dump(), {**call.model_dump(), "id": "call00002"}]
    results = [result, {**result, "tool_call_id": "call00002"}]
    messages = [*user("hello"), {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    turns = [
        {"role": "assistant", "content": "\n".join([HERMES.write("now", {})] * 2)},
        {"role": "user", "content": "\n".join(["<tool_response>\nnoon\n</tool_response>"] * 2)},
    ]
    for more in ({}, {"tools": [NOW], "tool_choice": "none"}):
        told = client.chat.completions.create(**ASKED | {"messages": messages, "max_tokens": 1}, **more)
        assert told.usage.prompt_tokens == len(text.encode_messages([*user("hello"), *turns]))
    # Instructions of the client stay ahead of the tools.
    system = [{"role": "system", "content": "Be brief."}, *user("hello")]
    told = client.chat.completions.create(**ASKED | {"messages": system, "max_tokens": 1}, tools=[NOW])
    shown = [{"role": "system", "content": f"Be brief.\n\n{WORDS}"}, *user("hello")]
    assert told.usage.prompt_tokens == len(text.encode_messages(shown))
    known = engines["thinks"].tokenizer.encode_messages(user("hello"), {"tools": [NOW]})
    told = client.chat.completions.create(**ASKED | {"model": "thinks", "max_tokens": 1}, tools=[NOW])
    assert told.usage.prompt_tokens == len(known)


def test_reasoning_is_apart_and_free(client, engines):
    """Thoughts are what the model says without a grammar; the schema holds what comes after them."""
    thinking = {"chat_template_kwargs": {"think": True}}
    bytes_of = TokenText(engines["thinks"].tokenizer).of
    ascii_alone = {str(token): -100.0 for token in range(320) if token < 2 or not b"" < bytes_of(token) < b"\x7f"}
    asked = ASKED | {"model": "thinks", "extra_body": thinking, "max_tokens": 60, "logit_bias": ascii_alone}
    sampling = {"temperature": 1.0, "seed": 3, "logit_bias": {int(token): -100.0 for token in ascii_alone}}
    free = engines["thinks"].generate(user("hello"), 60, sampling=sampling, **thinking)
    answered = client.chat.completions.create(**asked)
    got = answered.choices[0].message
    assert (got.content, got.reasoning_content) == ("", free.text.lstrip())
    assert answered.usage.completion_tokens_details.reasoning_tokens == answered.usage.completion_tokens
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
    held = client.chat.completions.create(**asked, response_format=form).choices[0].message
    assert held.reasoning_content == got.reasoning_content
    tools = client.chat.completions.create(**asked, tools=[NOW], tool_choice="required").choices[0].message
    assert tools.content in (None, "") and tools.reasoning_content
    # Without thoughts the schema holds from the first token on.
    asked = ASKED | {"model": "thinks", "response_format": form}
    validate(json.loads(client.chat.completions.create(**asked).choices[0].message.content), PARAMETERS)


def test_a_schema_of_text_beside_tools(client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "yes"}}}
    asked = ASKED | {"tools": [NOW], "response_format": form, "parallel_tool_calls": False}
    for seed in range(4):
        got = client.chat.completions.create(**asked | {"seed": seed}).choices[0]
        assert (got.message.content == '"yes"') != bool(got.message.tool_calls)


def test_a_form_of_text_beside_tools_is_checked(client):
    """What is no form is refused by its field, and nothing of it is left out in silence."""
    asked = ASKED | {"tools": [NOW], "parallel_tool_calls": False, "tool_choice": "auto"}

    def answer(**form):
        return client.chat.completions.create(**asked, extra_body={"structured_outputs": form}).choices[0].message

    held = answer(json={"const": "yes"}, json_object=False)
    assert (held.content == '"yes"') != bool(held.tool_calls)
    anything = answer(json="true")
    assert anything.content or anything.tool_calls
    for form, wrong in (
        ({"json": "{bad"}, "structured_outputs: json: expected a JSON schema"),
        ({"json": None, "json_object": None, "regex": "a"}, "tools: expected a JSON schema at most beside them"),
        ({"json": None}, "structured_outputs: expected one of"),
    ):
        with pytest.raises(openai.BadRequestError, match=wrong):
            answer(**form)
    with pytest.raises(openai.BadRequestError, match="response_format: "):
        client.chat.completions.create(
            **ASKED, tools=[], response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": ODD}}
        )


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "custom": {"name": "run"}}])
def test_a_custom_tool(choice, client, engines):
    """Its call has the text, which its format holds; a stream has it in pieces; the model sees a function."""
    asked = ASKED | {"tools": [custom_tool(grammar("regex", "[ab]{9}"))], "tool_choice": choice}
    asked["parallel_tool_calls"] = False
    got = client.chat.completions.create(**asked).choices[0]
    [call] = got.message.tool_calls
    assert call.type == "custom" and call.custom.name == "run" and re.fullmatch("[ab]{9}", call.custom.input)
    assert got.finish_reason == ("tool_calls" if choice == "required" else "stop")
    chunks = client.chat.completions.create(**asked, stream=True)
    first, *more = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or []]
    assert first.type == "custom" and first.id and first.index == 0 and first.custom["name"] == "run"
    assert all(each.type is None and "name" not in each.custom for each in more)
    assert "".join(each.custom["input"] for each in [first, *more]) == call.custom.input
    # Sent back, it is a call of that function.
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    messages = [*user("hello"), {"role": "assistant", "tool_calls": [call.model_dump()]}, result]
    sent = ASKED | {"model": "thinks", "messages": messages, "tools": [custom_tool(None)], "max_tokens": 1}
    told = client.chat.completions.create(**sent)
    function = {"name": "run", "arguments": {"input": call.custom.input}}
    messages[1] = {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]}
    shown = engines["thinks"].tokenizer.encode_messages(messages, {"tools": [{"function": {"name": "run"}}]})
    assert told.usage.prompt_tokens == len(shown)


def test_logprobs_of_calls(client):
    got = client.chat.completions.create(**ASKED, tools=[NOW], tool_choice="required", logprobs=True).choices[0]
    assert len(got.logprobs.content) > 10


@pytest.mark.parametrize(
    ("sent", "param", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice", "expected tools beside it"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "among now"),
        ({"tools": [NOW], "tool_choice": {"type": "any"}}, "tool_choice", "expected none, auto, required"),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "allowed_tools with"),
        ({"tools": [NOW, NOW]}, "tools", "names that differ"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "expected function or custom"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom", "name and perhaps format"),
        ({"tools": [custom_tool({"type": "grammar"})]}, "tools[0].custom.format", "lark.* or .*regex"),
        (
            {"tools": [custom_tool(grammar("lark", "start: X"))]},
            "tools",
            "run: format: expected text or a regex grammar",
        ),
        ({"tools": [custom_tool(grammar("regex", "(a"))]}, "tools", "unclosed group"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "name and parameters"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters, digits"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
            "schema of an object",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
            "tools[0].function.strict",
            "true or false",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": ODD}}]},
            "tools",
            "unevaluatedItems",
        ),
        ({"tools": [NOW], "structured_outputs": {"regex": "a"}}, "tools", "a JSON schema at most"),
        *(
            (
                {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]},
                f"tools[0].function.parameters.{at}",
                "expected a ",
            )
            for parameters, at in (
                ({"properties": {"a": {}}, "required": True}, "required"),
                ({"properties": {"a": {}}, "required": [1]}, "required"),
                ({"properties": {"a": 5}}, "properties.a"),
                ({"properties": {"a": {"enum": "x"}}}, "properties.a.enum"),
            )
        ),
    ],
)
def test_what_cannot_be_taken_is_refused_by_name(sent, param, message, client):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.chat.completions.create(model="tiny", messages=user("hello"), max_tokens=5, extra_body=sent)
    assert caught.value.param == param


def test_a_keyword_that_cannot_be_kept_holds_where_nobody_is_strict(client):
    tool = {"type": "function", "function": {"name": "f", "parameters": ODD}}
    got = client.chat.completions.create(**ASKED, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    assert json.loads(got.choices[0].message.tool_calls[0].function.arguments) == {}


def test_the_user_says_the_form(engines):
    app = create_app(engines, ServeOptions(tool_format="pythonic"))
    with running(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        properties = {"unit": {"enum": ["c", "f"]}, "far": {"type": "boolean"}}
        function = {"name": "f", "parameters": {"properties": properties, "required": ["unit", "far"]}}
        asked = ASKED | {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
        got = client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0].message.tool_calls[0]
        assert re.fullmatch(r'{"unit": "[cf]", "far": (true|false)}', got.function.arguments)
    with pytest.raises(specstep.InputError, match=r"tool-format: expected one of deepseek-v3, .* got x"):
        ServeOptions(tool_format="x")
    with pytest.raises(
        specstep.InputError, match=r"expected harmony for a chat template with channels, .* got harmony"
    ):
        create_app(engines, ServeOptions(tool_format="harmony"))


def test_a_model_without_tools_in_its_template_is_told_of_them():
    assert '{"type": "function", "function": {"name": "now"}}' in WORDS
    assert '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": ".."}}\n</tool_call>' in WORDS
