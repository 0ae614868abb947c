"""Answers in channels, as gpt-oss writes them, through OpenAI's client: the engine's marks are special tokens."""

import json
from pathlib import Path

import openai
import pytest
import specstep
from jsonschema import validate
from models import CHANNEL_IDS, save_channel_model, token_of
from served import PATIENCE, joined, running, user
from specstep.runtime.text.channels import CHANNEL, END, MESSAGE, START, ChannelMessage
from specstep.serving.app import create_app

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "unit": {"enum": ["c", "f"]}},
    "required": ["city", "unit"],
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "of a city", "parameters": PARAMETERS},
}
NOTHING = {"type": "object", "properties": {}}
NOW = {"type": "function", "function": {"name": "now", "description": "the time", "parameters": NOTHING}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ASKED = {"model": "channels", "messages": user("hello"), "max_tokens": 400, "temperature": 1.0}
CHANNELS = (Path(__file__).parents[2] / "data/chat_templates/gpt_oss.jinja").read_text()


@pytest.fixture(scope="module")
def channels(tmp_path_factory):
    """A client of a model that answers in channels, whose marks are special tokens, and its engine."""
    folder = save_channel_model(tmp_path_factory.mktemp("channels"), CHANNELS)
    options = {"drafter": "ngram", "dtype": "float32", "max_batch": 2, "max_seq_len": 1536, "prefill_chunk": 64}
    with specstep.eager(str(folder), **options) as engine:
        engine.learning = False
        with running(create_app({"channels": engine})) as url, openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
        ) as client:  # fmt: skip
            yield client, engine


HM = [CHANNEL, "analysis", MESSAGE, "Hm.", END, START, "assistant"]
SHORT = {str(CHANNEL_IDS[END]): 50.0}  # a thought that has no words


def spoken(*parts):
    """A grammar of one answer, of marks and texts."""
    terms = [f"<[{CHANNEL_IDS[part]}]>" if part in CHANNEL_IDS else json.dumps(part) for part in parts]
    return {"structured_outputs": {"grammar": f"start: {' '.join(terms)}", "whole": True}}


@pytest.mark.parametrize("function", [None, NOW])
def test_channels_are_read(function, channels):
    """Reasoning apart, text without marks, with tools at hand that may not be called and without."""
    client, _ = channels
    tools = {"tools": [function], "tool_choice": "none"} if function else {}
    asked = ASKED | tools
    form = spoken(*HM, CHANNEL, "final", MESSAGE, "Hello ", "there")
    got = client.chat.completions.create(**asked, extra_body=form).choices[0]
    assert (got.message.reasoning_content, got.message.content) == ("Hm.", "Hello there")
    assert got.message.tool_calls is None and got.finish_reason == "stop"
    assert joined(client.chat.completions.create(**asked, extra_body=form, stream=True))[0] == "Hello there"
    stopped = client.chat.completions.create(**asked, extra_body=form, stop="lo").choices[0]
    assert stopped.message.content == "Hel"


def test_tokens_of_reasoning_are_counted(channels):
    client, _ = channels
    form = spoken(*HM, CHANNEL, "final", MESSAGE, "Hello")
    expected = 1 + len("analysis") + 1 + len("Hm.") + 1  # a token for each byte, and for each mark
    got = client.chat.completions.create(**ASKED, extra_body=form)
    assert got.usage.completion_tokens_details.reasoning_tokens == expected
    none = client.chat.completions.create(**ASKED, extra_body=spoken(CHANNEL, "final", MESSAGE, "Hello"))
    assert none.usage.completion_tokens_details.reasoning_tokens == 0
    cut = client.chat.completions.create(**ASKED | {"max_tokens": 12}, extra_body=form)
    assert cut.usage.completion_tokens_details.reasoning_tokens == 12


def test_in_python_all_channels_are_there(channels):
    """The text has their marks, streamed and whole and with stop strings, and is read as messages."""
    _, engine = channels
    written = "".join([*HM, CHANNEL, "final", MESSAGE, "Hello there"])
    held = spoken(*HM, CHANNEL, "final", MESSAGE, "Hello ", "there")
    sampling = {"structured": held["structured_outputs"]}
    whole = engine.generate(user("hello"), 60, sampling=sampling)
    assert whole.text == written == "".join(engine.stream(user("hello"), 60, sampling=sampling))
    assert whole.channels == (ChannelMessage("analysis", "", "Hm."), ChannelMessage("final", "", "Hello there"))
    stopped = engine.generate(user("hello"), 60, sampling=sampling | {"stop": [END]})
    assert stopped.text == f"{CHANNEL}analysis{MESSAGE}Hm." and stopped.channels[0].body == "Hm."


def test_a_form_of_text_holds_in_the_final_channel(channels):
    client, engine = channels
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    asked = ASKED | {"response_format": form, "logit_bias": SHORT | {str(token_of("f")): 9.0}}
    for tools in ({}, {"tools": [NOW], "tool_choice": "none"}):
        for seed in range(2):
            got = client.chat.completions.create(**asked | tools | {"seed": seed}).choices[0]
            assert got.message.content in ('"yes"', '"no"') and got.finish_reason == "stop"
    bias = {int(token): value for token, value in asked["logit_bias"].items()}
    sampling = {"structured": {"choice": ["yes"]}, "temperature": 1.0, "logit_bias": bias}
    assert engine.generate(user("hello"), 400, sampling=sampling).channels[-1] == ChannelMessage("final", "", "yes")


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop"), ("auto", "tool_calls")])
def test_calls_in_channels(choice, reason, channels):
    client, _ = channels
    bias = SHORT | {str(token_of(" ")): 9.0, str(token_of("f")): -9.0}
    asked = ASKED | {"tools": [WEATHER, NOW], "tool_choice": choice, "logit_bias": bias}
    for seed in range(2):
        got = client.chat.completions.create(**asked | {"seed": seed}).choices[0]
        assert got.finish_reason == reason and got.message.content is None
        [call] = got.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "get_weather" or arguments == {}
        validate(arguments, PARAMETERS if arguments else {})
        told = (None, [(call.function.name, call.function.arguments)], reason)
        assert joined(client.chat.completions.create(**asked | {"seed": seed}, stream=True)) == told


def test_a_conversation_with_calls_in_channels(channels):
    """Each call and its result as the template writes them, however many a message has."""
    client, engine = channels
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in ("a", "b")]
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in ("b", "a")]
    messages = [*user("hello"), {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": calls}, *results]
    undescribed = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
    asked = {"model": "channels", "messages": messages, "tools": [undescribed], "max_tokens": 1}
    told = client.chat.completions.create(**asked)
    shown = engine.tokenizer.render(
        [
            *user("hello"),
            {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [data_of(calls[0])]},
            results[1],
            {"role": "assistant", "tool_calls": [data_of(calls[1])]},
            results[0],
        ],
        {"tools": [{**undescribed, "function": {"description": "", **undescribed["function"]}}]},
    )
    assert "to=functions.a<|message|>{}<|call|><|start|>functions.a<|message|>" in shown and "Hm." in shown
    assert told.usage.prompt_tokens == len(engine.tokenizer.encode_part(shown))


def data_of(call):
    return {**call, "function": {**call["function"], "arguments": {}}}
