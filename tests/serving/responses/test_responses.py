"""The Responses API, through OpenAI's client, against the same chats."""

import json
import re
from itertools import pairwise

import openai
import pydantic
import pytest
import specstep
from hypothesis import given
from hypothesis import strategies as st
from models import save_model, tiny_tokenizer
from served import PATIENCE, running, user
from specstep.runtime.calls.formats import HERMES
from specstep.runtime.calls.tool import Tool, Tools
from specstep.runtime.text.reasoning import Reasoning
from specstep.serving.app import create_app
from specstep.serving.responses.fields import ResponsesRequest
from specstep.serving.responses.output import Output
from specstep.serving.tools.answer_reader import AnswerReader

WARM = {"temperature": 0.9, "model": "tiny"}
NOW = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {"utc": {"type": "boolean"}}}}
CHAT_NOW = {"type": "function", "function": {name: value for name, value in NOW.items() if name != "type"}}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("model"), tokenizer=True, max_position_embeddings=2048)
    template = tiny_tokenizer()
    template.chat_template += "{% if think %}<think>{% else %}<think></think>{% endif %}"
    template.save_pretrained(folder)
    options = {"drafter": "ngram", "dtype": "float32", "max_batch": 2, "max_seq_len": 1536, "prefill_chunk": 64}
    with specstep.eager(str(folder), **options) as engine:
        engine.learning = False
        with running(create_app({"tiny": engine})) as url, openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
        ) as client:  # fmt: skip
            yield client


BRIEF = [{"role": "system", "content": "Be brief."}, *user("hello")]
PARTS = [{"type": "input_text", "text": "hel"}, {"type": "input_text", "text": "lo"}]
SAID = {"type": "message", "role": "assistant", "id": "x", "content": [{"type": "output_text", "text": "b"}]}


@pytest.mark.parametrize(
    ("sent", "messages"),
    [
        ({"input": "hello"}, user("hello")),
        ({"input": user("hello"), "instructions": "Be brief."}, BRIEF),
        ({"input": [{"role": "user", "content": PARTS}]}, user("hel\nlo")),
        ({"input": [*user("a"), SAID, *user("c")]}, [*user("a"), {"role": "assistant", "content": "b"}, *user("c")]),
    ],
)
def test_text_is_that_of_the_chat(sent, messages, client):
    asked = {"model": "tiny", "temperature": 0.0}
    expected = client.chat.completions.create(messages=messages, max_tokens=30, **asked)
    got = client.responses.create(max_output_tokens=30, **sent, **asked)
    assert (
        got.output_text == expected.choices[0].message.content
        and got.id.startswith("resp_")
        and got.object == "response"
    )
    reason = expected.choices[0].finish_reason
    assert got.status == {"stop": "completed", "length": "incomplete"}[reason]
    assert (got.incomplete_details is None) == (reason == "stop")
    assert got.usage.input_tokens == expected.usage.prompt_tokens
    assert got.usage.output_tokens == expected.usage.completion_tokens


class Answer(pydantic.BaseModel):
    ok: bool


def test_a_form_of_text(client):
    got = client.responses.parse(input="hello", text_format=Answer, max_output_tokens=120, **WARM)
    assert isinstance(got.output_parsed, Answer) and got.status == "completed"
    asked = {"input": "hello", "max_output_tokens": 150, "text": {"format": {"type": "json_object"}}}
    got = client.responses.create(**asked, **WARM)
    assert got.status == "incomplete" or isinstance(json.loads(got.output_text), dict)


def stream(client, **asked):
    """The events of a stream, whose numbers and items are right, and the response that ends it."""
    events = list(client.responses.create(stream=True, **asked))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type in ("response.completed", "response.incomplete")
    response, told, opened = events[-1].response, {}, []
    for event in events[2:-1]:
        if event.type == "response.output_item.added":
            assert event.output_index == len(opened)
            opened.append(event.item.id)
            told[event.output_index] = ""
        assert event.output_index == len(opened) - 1, "one item after the other"
        if event.type.endswith(".delta"):
            assert event.item_id == opened[-1]
            told[event.output_index] += event.delta
        elif event.type in ("response.output_text.done", "response.reasoning_text.done"):
            assert event.text == told[event.output_index]
        elif event.type == "response.function_call_arguments.done":
            assert event.arguments == told[event.output_index]
        elif event.type == "response.custom_tool_call_input.done":
            assert event.input == told[event.output_index]
        elif event.type == "response.output_item.done":
            assert event.item == response.output[event.output_index]
    for index, item in enumerate(response.output):
        assert told[index] == text_of(item)
    return response


def text_of(item):
    if item.type == "function_call":
        return item.arguments
    if item.type == "custom_tool_call":
        return item.input
    return item.content[0].text if item.content else ""


def test_streams(client):
    asked = {"input": "hello", "max_output_tokens": 30, "model": "tiny", "temperature": 0.0}
    assert stream(client, **asked).output_text == client.responses.create(**asked).output_text
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["a", "b"]}, "strict": True}}
    held = stream(client, **asked, text=form)
    assert held.output_text in ('"a"', '"b"') and held.status == "completed" and held.usage.output_tokens


def test_calls(client):
    asked = {"input": "hello", "max_output_tokens": 200, "tools": [NOW], "parallel_tool_calls": False, **WARM}
    for choice in ("required", {"type": "function", "name": "now"}):
        for got in (client.responses.create(**asked, tool_choice=choice), stream(client, **asked, tool_choice=choice)):
            [call] = got.output
            assert call.type == "function_call" and call.name == "now" and got.status == "completed"
            assert json.loads(call.arguments).keys() <= {"utc"}
    # The call goes back as it came, and what is asked then is what a chat asks.
    items = [
        *user("hello"),
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "noon"},
    ]
    back = client.responses.create(**asked | {"input": items, "max_output_tokens": 1})
    function = {"name": "now", "arguments": call.arguments}
    messages = [
        *user("hello"),
        {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "noon"},
    ]
    chat = client.chat.completions.create(model="tiny", messages=messages, tools=[CHAT_NOW], max_tokens=1)
    assert back.usage.input_tokens == chat.usage.prompt_tokens
    # What it said ahead of the call is of the same turn.
    words = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]}
    back = client.responses.create(**asked | {"input": [items[0], words, *items[1:]], "max_output_tokens": 1})
    messages[1]["content"] = "Let me see."
    chat = client.chat.completions.create(model="tiny", messages=messages, tools=[CHAT_NOW], max_tokens=1)
    assert back.usage.input_tokens == chat.usage.prompt_tokens


def test_custom_tools(client):
    held = {"type": "grammar", "syntax": "regex", "definition": "[ab]{9}"}
    tools = [{"type": "custom", "name": "run", "description": "runs it", "format": held}]
    asked = {"input": "hello", "tools": tools, "max_output_tokens": 300, "parallel_tool_calls": False}
    for choice in ("required", {"type": "custom", "name": "run"}):
        for got in (
            client.responses.create(**asked, **WARM, tool_choice=choice),
            stream(client, **asked, **WARM, tool_choice=choice),
        ):
            [call] = got.output
            assert call.type == "custom_tool_call" and call.name == "run" and re.fullmatch("[ab]{9}", call.input)
    items = [
        *user("hello"),
        call.model_dump(),
        {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"},
    ]
    back = client.responses.create(**asked | {"input": items, "max_output_tokens": 1}, **WARM)
    custom = {"id": call.call_id, "type": "custom", "custom": {"name": "run", "input": call.input}}
    messages = [
        *user("hello"),
        {"role": "assistant", "tool_calls": [custom]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "ok"},
    ]
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[ab]{9}"}}
    told = [{"type": "custom", "custom": {"name": "run", "description": "runs it", "format": grammar}}]
    chat = client.chat.completions.create(model="tiny", messages=messages, tools=told, max_tokens=1)
    assert back.usage.input_tokens == chat.usage.prompt_tokens


def test_reasoning(client):
    thinking = {"chat_template_kwargs": {"think": True}}
    asked = {"input": "hello", "max_output_tokens": 30, "temperature": 0.0, "model": "tiny", "extra_body": thinking}
    for got in (client.responses.create(**asked), stream(client, **asked)):
        [item] = got.output
        assert item.type == "reasoning" and item.content[0].text and item.status == got.status
        assert got.usage.output_tokens_details.reasoning_tokens == got.usage.output_tokens == 30


def test_reasoning_of_earlier_items_is_kept():
    """Of several, and of a summary where there is nothing else."""
    items = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text} for text in "ab"]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "c"}]},
        {"role": "assistant", "content": "So."},
    ]
    [message] = ResponsesRequest.model_validate({"input": items}).chat().messages
    assert message.plain() == {"role": "assistant", "content": "So.", "reasoning_content": "a\nb\nc"}


@given(data=st.data())
def test_items_do_not_depend_on_pieces(data):
    written = "I think</think>\n\nSo: " + HERMES.write("now", {"utc": True}) + "\n" + HERMES.write("now", {})
    cuts = sorted(data.draw(st.sets(st.integers(1, len(written) - 1))) | {0, len(written)})
    tools = Tools([Tool("now", {}, False)], True, False, False)
    output = Output(AnswerReader(Reasoning("<think>", "</think>", True), tools, HERMES))
    events = [event for start, end in pairwise(cuts) for event in output.push(written[start:end])]
    events += output.end(True)
    kinds = [event["type"].removeprefix("response.") for event in events if event["type"].endswith("item.done")]
    assert len(kinds) == 4 and all(item["status"] == "completed" for item in output.items)
    reasoning, message, first, second = output.items
    assert reasoning["content"][0]["text"] == "I think" and message["content"][0]["text"] == "So:"
    assert (first["arguments"], second["arguments"]) == ('{"utc": true}', "{}")


@pytest.mark.parametrize(
    ("sent", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"conversation": "c"}, "conversation", "not supported"),
        ({"background": True}, "background", "not supported"),
        ({"include": ["file_search_call.results"]}, "include", "nothing more"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "expected a message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "expected a part"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0]", "expected messages and calls"),
        ({"instructions": "x", "input": [{"role": "king", "content": "x"}]}, "input[0]", "expected messages and calls"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0]", "name and arguments"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", r"^Error.*tools\[0\]\.name: "),
        ({"input": []}, "input", "at least 1"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "expected function"),
        ({"tool_choice": "required"}, "tool_choice", "tools beside it"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "expected text, json_object"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "expected an effort"),
        ({"input": "x" * 3000}, "input", "expected at most"),
        ({"n": 2}, "n", "does not"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_name(sent, param, message, client):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.post("/responses", body={"input": "hello", "model": "tiny", **sent}, cast_to=object)
    assert caught.value.param == param
