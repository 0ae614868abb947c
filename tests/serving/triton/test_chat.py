"""Chats that are asked of a model in Triton: the HTTP server's fields, answers and errors."""

import json
import re
import sys

import pytest
from fake_session import FakeSession
from fake_triton import ask, started, tokens_of
from fastapi.testclient import TestClient
from models import tiny_tokenizer
from served import user
from specstep.runtime.calls.template import TemplateTools
from specstep.runtime.engine import Engine
from specstep.runtime.text.tokenizer import EngineTokenizer
from specstep.serving.app import create_app

# A model that thinks if it is asked to, and that is shown its tools.
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.role }}: "
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "\n<tool_call>\n{\"name\": \"{{ c.function.name }}\", \"arguments\": "
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}\n{% endfor %}bot:{% if think %}<think>\n{% else %}"
    "<think></think>{% endif %}"
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
RUN = {"type": "custom", "custom": {"name": "run", "format": {"type": "grammar", "grammar": {
    "syntax": "regex", "definition": "[ab]{9}"
}}}}  # fmt: skip
CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "look", "arguments": '{"ok": true, "n": 1}'}}
EARLIER = [
    *user("hello"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "noon"},
]
FORM = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
REQUIRED = {"tools": [LOOK, RUN], "tool_choice": "required", "parallel_tool_calls": False}
ONE = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [LOOK]}}
BODIES = {
    "text": {},
    "a schema": {"response_format": FORM},
    "choices": {"structured_outputs": {"choice": ["yes", "no"]}},
    "a grammar": {"grammar": 'root ::= "a" ("b" | "c") "d"'},
    "llama.cpp's schema": {"json_schema": SCHEMA},
    "a call": REQUIRED,
    "a named call": REQUIRED | {"tool_choice": {"type": "function", "function": {"name": "look"}}},
    "an allowed call": REQUIRED | {"tool_choice": ONE},
    "a custom call": REQUIRED | {"tools": [RUN]},
    "several calls": {"tools": [LOOK], "tool_choice": "required", "max_tokens": 300},
    "no call": {"tools": [LOOK], "tool_choice": "none"},
    "perhaps a call": {"tools": [LOOK], "response_format": FORM, "seed": 5},
    "earlier calls": {"messages": EARLIER, "tools": [LOOK]},
    "thoughts": {"chat_template_kwargs": {"think": True}, "tools": [LOOK], "tool_choice": "required"},
    "two choices": REQUIRED | {"n": 2},
    "sampling": {"top_p": 0.9, "min_p": 0.01, "logit_bias": {"70": 2.5}, "min_tokens": 9, "stop": ["a", "e"]},
    "greedy": {"temperature": 0, "max_tokens": None, "max_completion_tokens": 9, "ignore_eos": True},
    "as clients stream": {"model": "any", "stream": True, "stream_options": {"include_usage": True}},
}


@pytest.fixture(scope="module")
def fronts():
    """A model in Triton and the HTTP server, over one engine."""
    text = EngineTokenizer(tiny_tokenizer().backend_tokenizer, TEMPLATE, {})
    session = FakeSession(2, vocabulary=258, stops=(1,), longest=190)
    engine = Engine(session, text, None, TemplateTools("hermes", True, True, False))
    with TestClient(create_app({"tiny": engine})) as client:
        model, _ = started(lambda: engine, 4)
        yield model, client
        model.finalize()


def test_calls_may_be_written_in_another_form():
    tokenizer = tiny_tokenizer()
    session = FakeSession(2, vocabulary=258, stops=(1,), longest=190)
    text = EngineTokenizer(tokenizer.backend_tokenizer, TEMPLATE, {})
    engine = Engine(session, text, None, TemplateTools("hermes", True, True, False))
    model, _ = started(lambda: engine, 4, "glm-4.5")
    sent = ask(model, chat_request=json.dumps({"messages": user("hello"), "max_tokens": 120} | REQUIRED)).done()
    [told], _ = answers(sent)
    assert told["message"]["tool_calls"] and "<arg_key>" in tokenizer.decode(tokens_of(sent))
    model.finalize()


def answers(sent):
    """The choices as clients put them together: what the server says of them, but for the ids of calls."""
    told = {}
    for one in sent:
        assert one.error is None, one.error.message
        outputs = {name: values.tolist() for name, values in one.outputs.items()}
        [index], [reason], [text] = outputs["choice"], outputs["finish_reason"], outputs["text"]
        choice = told.setdefault(index, {"message": {}, "finish_reason": "", "tokens": 0})
        assert not choice["finish_reason"], "nothing comes after the end"
        delta = json.loads(outputs["delta"][0])
        assert delta.get("content", "") == text.decode()
        choice["finish_reason"] = reason.decode()
        choice["tokens"] += len(outputs["token_ids"])
        assert outputs["completion_tokens"] == [choice["tokens"]]
        for name, new in delta.items():
            if name != "tool_calls":
                choice["message"][name] = choice["message"].get(name, "") + new
        for new in delta.get("tool_calls", ()):
            add_call(choice["message"].setdefault("tool_calls", []), new)
    return [told[index] for index in sorted(told)], outputs["prompt_tokens"][0]


def add_call(calls, new):
    kind, given = ("custom", "input") if "custom" in new else ("function", "arguments")
    if new["index"] == len(calls):
        assert re.fullmatch("[A-Za-z0-9]{9}", new["id"])
        calls.append({"type": new["type"], kind: {"name": new[kind]["name"], given: ""}})
    calls[new["index"]][kind][given] += new[kind][given]


def said(choice):
    """A choice of the server's in the same form."""
    texts = ("content", "reasoning_content")
    message = {name: choice["message"][name] for name in texts if choice["message"].get(name)}
    if calls := choice["message"].get("tool_calls"):
        message["tool_calls"] = [{name: call[name] for name in call if name != "id"} for call in calls]
    return {"message": message, "finish_reason": choice["finish_reason"]}


@pytest.mark.parametrize("name", BODIES)
def test_the_answer_is_the_servers(name, fronts):
    model, client = fronts
    body = {"messages": user("hello"), "max_tokens": 120, "temperature": 1.0, "seed": 3} | BODIES[name]
    told, prompt_tokens = answers(ask(model, chat_request=json.dumps(body)).done())
    whole = client.post("/v1/chat/completions", json=body | {"stream": False, "stream_options": None, "model": "tiny"})
    expected = whole.json()
    assert [{name: choice[name] for name in ("message", "finish_reason")} for choice in told] == [
        said(choice) for choice in expected["choices"]
    ]
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": sum(choice["tokens"] for choice in told)}
    assert counts.items() <= expected["usage"].items()


def test_what_each_asks_for_is_there(fronts):
    """So that the comparison above is one of calls, thoughts and schemas."""
    model, _ = fronts
    asked = {"messages": user("hello"), "max_tokens": 120, "temperature": 1.0, "seed": 3}

    def message(name):
        [told], _ = answers(ask(model, chat_request=json.dumps(asked | BODIES[name])).done())
        return told["message"], told["finish_reason"]

    for name, reason in {"a call": "tool_calls", "a named call": "stop", "a custom call": "tool_calls"}.items():
        assert len(message(name)[0]["tool_calls"]) == 1 and message(name)[1] == reason
    assert set(json.loads(message("a schema")[0]["content"])) == {"ok", "n"}
    assert message("choices")[0]["content"] in ("yes", "no")
    assert message("thoughts")[0]["reasoning_content"]


def test_logprobs_are_told_as_of_other_prompts(fronts):
    model, _ = fronts
    body = {"messages": user("hello"), "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    sent = [one.outputs for one in ask(model, chat_request=json.dumps(body)).done()]
    told = [each for outputs in sent for each in json.loads(outputs["logprobs"][0])]
    assert [each[0] for each in told] == [token for outputs in sent for token in outputs["token_ids"].tolist()]
    assert all(logprob <= 0 and len(top) == 2 for _, logprob, top in told)


@pytest.mark.parametrize(
    "changed",
    [
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"temperature": "1"},
        {"n": 0},
        {"max_tokens": 0},
        {"nonsense": 1},
        {"modalities": ["audio"]},
        {"stop_token_ids": [999]},
        {"min_tokens": 900},
        {"messages": user("x" * 600)},
        {"tool_choice": "required"},
        {"tools": [{"type": "web_search"}]},
        {"tools": [LOOK, LOOK]},
        {"response_format": {"type": "xml"}},
        {"response_format": FORM, "grammar": "start: x"},
        {"json_schema": {"unevaluatedItems": False}},
        {"grammar": "root ::= missing", "tools": [LOOK]},
        {"json_schema": SCHEMA, "bad_words": ["x"]},
    ],
)
def test_what_is_wrong_is_told_as_the_server_tells_it(changed, fronts):
    model, client = fronts
    body = {"messages": user("hello"), "max_tokens": 9} | changed
    [only] = ask(model, chat_request=json.dumps(body)).done()
    refused = client.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400 and only.error.code == "invalid"
    assert only.error.message.startswith(refused.json()["error"]["message"].removesuffix("…"))
    assert any(name in only.error.message for name in changed)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"chat_request": "{"}, "chat_request: expected JSON"),
        ({"chat_request": "[]"}, "chat_request: expected JSON of the form"),
        ({"chat_request": "{}", "messages": "[]"}, "got messages and chat_request"),
        ({"chat_request": "{}", "sampling": "{}"}, "sampling: expected none beside chat_request"),
        (
            {"chat_request": json.dumps({"messages": user("x"), "stream_options": {"include_drafts": True}})},
            "stream_options.include_drafts: expected false",
        ),
    ],
)
def test_what_does_not_fit_is_told(inputs, says, fronts):
    [only] = ask(fronts[0], **inputs).done()
    assert only.error.code == "invalid" and says in only.error.message


def test_a_missing_package_is_named(fronts, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydantic", None)
    [only] = ask(fronts[0], chat_request=json.dumps({"messages": user("hello")})).done()
    assert "pydantic" in only.error.message and "specstep[serve]" in only.error.message
