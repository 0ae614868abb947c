"""Structured output as clients ask for it: the server writes what the engine does under the same grammar."""

import json
from enum import Enum

import openai
import pydantic
import pytest
from served import PATIENCE, user
from specstep import SamplingParams

GREEDY = {"temperature": 0, "max_tokens": 60}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
NAMED = {"name": "answer", "schema": SCHEMA}
GBNF = 'root ::= "a" ("b" | "c") "d"'
FORMS = {
    "json_schema": ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, {"json": SCHEMA}),
    "strict": ({"response_format": {"type": "json_schema", "json_schema": NAMED | {"strict": True}}}, {"json": SCHEMA}),
    "json_object": ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    "llama.cpp's": ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
    "structured_outputs": ({"structured_outputs": {"choice": ["yes", "no"]}}, {"choice": ["yes", "no"]}),
    "grammar": ({"grammar": GBNF}, {"grammar": GBNF}),
    "a schema": ({"json_schema": SCHEMA}, {"json": SCHEMA}),
    "text": ({"response_format": {"type": "text"}}, None),
}


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_the_engines_grammar(name, client, tiny):
    sent, structured = FORMS[name]
    expected = tiny.generate(user("hello"), 60, sampling=SamplingParams(structured=structured))
    got = client.chat.completions.create(model="tiny", messages=user("hello"), extra_body=sent, **GREEDY)
    assert (got.choices[0].message.content, got.choices[0].finish_reason) == (expected.text, expected.finish_reason)
    pieces = client.chat.completions.create(
        model="tiny", messages=user("hello"), extra_body=sent, stream=True, **GREEDY
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == expected.text
    completed = tiny.generate("hello", 60, sampling=SamplingParams(structured=structured))
    got = client.completions.create(model="tiny", prompt="hello", extra_body=sent, **GREEDY)
    assert got.choices[0].text == completed.text


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Answer(pydantic.BaseModel):
    colour: Colour
    many: bool


def test_openais_parse(client):
    for seed in range(4):
        asked = {"messages": user("hello"), "response_format": Answer, "temperature": 1.5, "seed": seed}
        got = client.chat.completions.parse(model="tiny", max_tokens=120, **asked)
        assert isinstance(got.choices[0].message.parsed, Answer)


def test_what_is_cut_ends_with_length(client):
    got = client.chat.completions.create(
        model="tiny", messages=user("hello"), max_tokens=3, response_format=FORMS["json_schema"][0]["response_format"]
    )
    assert got.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("sent", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "expected text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", 'expected {"name": NAME'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"unevaluatedItems": False}}}},
            "response_format",
            "unevaluatedItems",
        ),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
        ({"grammar": "root ::= missing"}, "grammar", "missing"),
        ({"grammar": "start: x", "json_schema": {}}, "json_schema", "expected one of"),
        ({"json_schema": SCHEMA, "bad_words": ["x"]}, "bad_words", "beside structured"),
    ],
)
def test_what_cannot_be_kept_is_a_400_that_names_it(sent, param, message, client):
    with pytest.raises(openai.BadRequestError, match="(?s)" + message.replace("{", "[{]")) as caught:
        client.chat.completions.create(model="tiny", messages=user("hello"), extra_body=sent, max_tokens=5)
    assert caught.value.param == param


def test_rows_beside_it_are_as_alone(client, tiny):
    """Four choices under a grammar, and the same number without, at once."""
    free = tiny.generate(user("hello"), 30, sampling={"temperature": 0.9, "seed": 5}).text
    asked = {"model": "tiny", "messages": user("hello"), "temperature": 0.9, "seed": 5, "max_tokens": 140}
    form = FORMS["json_schema"][0]
    many = client.chat.completions.create(n=4, extra_body=form, **asked)
    assert {choice.finish_reason for choice in many.choices} == {"stop"}
    assert all(set(json.loads(choice.message.content)) == {"ok", "n"} for choice in many.choices)
    assert client.chat.completions.create(**(asked | {"max_tokens": 30})).choices[0].message.content == free
