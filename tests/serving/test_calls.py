"""Single calls: what is refused, how errors look, keys, limits, metrics and logs."""

import json
import logging

import pytest
from fastapi.testclient import TestClient
from served import user
from specstep.errors import InputError
from specstep.runtime.text.token_text import TokenText
from specstep.serving.app import create_app
from specstep.serving.fields import ChatMessage
from specstep.serving.options import ServeOptions
from specstep.serving.server import hosts_of
from specstep.serving.unsupported import UNSUPPORTED

CHAT, COMPLETIONS, JSON = "/v1/chat/completions", "/v1/completions", "application/json"


@pytest.fixture(scope="module")
def client(tiny):
    with TestClient(create_app({"tiny": tiny, "other": tiny}), raise_server_exceptions=False) as client:
        yield client


def refused(response, status=400):
    """The error of a call that must be one, in OpenAI's form."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def nested(levels):
    data = {}
    for _ in range(levels):
        data = {"a": data}
    return data


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 129), ("n", True), ("temperature", "1"), ("temperature", 0.001), ("temperature", -1),
        ("top_p", 0), ("min_p", 1.5), ("max_tokens", 0), ("max_tokens", 2.5), ("stop", [""]), ("stop", ["a"] * 17),
        ("stop", "x" * 600), ("logprobs", 1), ("top_logprobs", 21), ("top_logprobs", 2), ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 200}), ("stop_token_ids", [320]), ("stop_token_ids", list(range(17))), ("seed", 2**129),
        ("min_tokens", 500), ("bad_words", [""]), ("messages", []), ("messages", "hello"), ("presence_penalty", 3),
        ("metadata", {str(each): "x" for each in range(20)}), ("logit_bias", {str(each): 1 for each in range(900)}),
        ("messages", user("x") * 20_000), ("nonsense", 1), ("stream", "yes"),
        ("stream_options", {"include_usage": True}), ("chat_template_kwargs", {"messages": []}),
        ("logit_bias", {"9" * 5000: 1}), ("seed", 1.5), ("seed", -(2**129)), ("chat_template_kwargs", nested(900)),
        ("messages", [{"role": "assistant", "tool_calls": [nested(900)]}]), ("tools", [nested(900)]),
        ("chat_template_kwargs", {"x": [0] * 20_000}), ("tools", [{"type": "function"}]), ("tool_choice", "required"),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": ""}] * 7}] * 4096),
        ("messages", user("x") * 5000),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(client, field, value):
    error = refused(client.post(CHAT, json={"messages": user("hi"), field: value}))
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(field) and error["message"].startswith(field)


@pytest.mark.parametrize(("stop", "message"), [
    (1, "stop: input should be a valid string"), ("", "stop: string should have at least 1 character"),
    ([1], "stop[0]: input should be a valid string"), (["a"] * 17, "stop: list should have at most 16 items"),
])  # fmt: skip
def test_of_two_forms_the_one_that_was_meant_is_named(client, stop, message):
    error = refused(client.post(CHAT, json={"messages": user("hi"), "stop": stop}))
    assert error["param"].startswith("stop") and error["message"].startswith(message)
    error = refused(client.post(COMPLETIONS, json={"prompt": ["hi"] * 129}))
    assert error["message"].startswith("prompt: list should have at most 128 items")


@pytest.mark.parametrize("field", sorted(set(UNSUPPORTED) - {"tools", "tool_choice"}))
def test_what_is_not_supported_is_named_unless_it_asks_for_nothing(client, field):
    short = {"messages": user("hi"), "max_tokens": 2}
    error = refused(client.post(CHAT, json={**short, field: {"of": ["something"]}}))
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    for idle in (None, *UNSUPPORTED[field]):
        assert client.post(CHAT, json={**short, field: idle}).status_code == 200


def test_the_default_of_special_tokens_is_that_of_each_kind(client):
    """vLLM adds them to a prompt unless told otherwise, and to no chat."""
    kinds = {CHAT: ({"messages": user("hi")}, False), "/v1/completions": ({"prompt": "hi"}, True)}
    for path, (asked, default) in kinds.items():
        for given in (True, False):
            status = client.post(path, json={**asked, "max_tokens": 1, "add_special_tokens": given}).status_code
            assert status == (200 if given == default else 400)


def test_images_are_refused_by_name_and_text_parts_are_not(client, tiny):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    image = {"type": "image_url", "image_url": {"url": "data:secret"}}
    asked = {"max_tokens": 5, "temperature": 0}
    error = refused(client.post(CHAT, json={"messages": [{"role": "user", "content": [*parts, image]}], **asked}))
    assert error["param"].startswith("messages[0].content[2]") and "secret" not in error["message"]
    messages = [{"role": "user", "content": parts}]
    got = client.post(CHAT, json={"messages": messages, **asked}).json()
    assert got["choices"][0]["message"]["content"] == tiny.generate(messages, 5).text


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("{", JSON), ("[" * 100_000, JSON), ('{"n": ' + "1" * 10_000 + "}", JSON), ("[]", JSON), ("null", JSON),
        ("", JSON), ("\xff", JSON), ('{"messages": []}', "text/plain"), ('{"prompt": [1, NaN]}', JSON),
        ('{"a\\ud800": 1, "messages": "\\ud800"}', JSON),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', JSON),
    ],
)  # fmt: skip
def test_bodies_that_are_corrupt_are_an_error_and_the_next_call_is_answered(client, body, kind):
    for path in (CHAT, COMPLETIONS, "/tokenize"):
        refused(client.post(path, content=body.encode("latin-1"), headers={"Content-Type": kind}))
    assert client.post(COMPLETIONS, json={"prompt": "hi", "max_tokens": 2}).status_code == 200


def test_prompts_that_cannot_fit(client, tiny):
    for path, asked in (
        (CHAT, {"messages": user("x" * 300)}),
        (CHAT, {"messages": user("x" * 100_000)}),  # refused before it is tokenised
        (CHAT, {"messages": user("x") * 500}),
        (CHAT, {"messages": [*user("x"), {"role": "assistant", "content": "", "reasoning_content": "x" * 100_000}]}),
        (
            CHAT,
            {"messages": [*user("x"), {"role": "assistant", "tool_calls": [{"function": {"name": "x" * 100_000}}]}]},
        ),
        (CHAT, {"messages": [{"role": "tool", "content": "", "tool_call_id": "x" * 500, "name": "x" * 500}] * 100}),
        ("/tokenize", {"messages": [*user("x"), {"role": "assistant", "tool_calls": [{"x": 10**4000}] * 100}]}),
        (COMPLETIONS, {"prompt": "x" * 300}),
        (COMPLETIONS, {"prompt": [5] * 192}),
        (COMPLETIONS, {"prompt": [[5], [5] * 300]}),
        ("/tokenize", {"prompt": "x" * 100_000}),
    ):
        error = refused(client.post(path, json=asked))
        assert error["code"] == "context_length_exceeded" and error["param"] in asked
        assert "xxx" not in error["message"]
    assert (
        client.post(COMPLETIONS, json={"prompt": [5] * 191, "max_tokens": 1000}).json()["usage"]["total_tokens"] == 192
    )


def test_a_large_variable_of_the_template_is_refused(client):
    error = refused(client.post(CHAT, json={"messages": user("x"), "chat_template_kwargs": {"x": {"y" * 100_000: 1}}}))
    assert error["code"] == "context_length_exceeded" and error["param"] == "chat_template_kwargs"


def test_what_agents_send_is_taken(client, tiny):
    """Calls without content, their arguments as text, and tools that are not to be called."""
    function = {"name": "sky", "arguments": '{"at": "here"}'}
    call = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    asked = [*user("hi"), call, {"role": "tool", "tool_call_id": "a", "content": "blue"}]
    more = {"tools": [{"type": "function", "function": {"name": "sky"}}], "tool_choice": "none", "max_tokens": 3}
    assert client.post(CHAT, json={"messages": asked, **more}).status_code == 200
    function["arguments"] = json.dumps(nested(900))
    told = client.post(CHAT, json={"messages": asked, **more})
    assert told.status_code == 400 and "messages: expected at most" in told.text, told.text
    assert ChatMessage(**call).plain()["tool_calls"][0]["function"]["arguments"] == json.dumps(nested(900))
    function["arguments"] = '{"at": "here"}'
    assert ChatMessage(**call).plain()["tool_calls"][0]["function"]["arguments"] == {"at": "here"}


def test_special_tokens_in_what_is_asked_are_text(client, tiny):
    name = tiny.tokenizer.tokenizer.id_to_token(1)
    for asked in ({"prompt": f"a{name}b"}, {"messages": user(f"a{name}b")}):
        text, parsed = (
            client.post("/tokenize", json={**asked, "parse_special": special}).json()["tokens"]
            for special in (False, True)
        )
        assert 1 not in text and 1 in parsed
        assert client.post("/tokenize", json=asked).json()["tokens"] == text
    for path, asked in ((COMPLETIONS, {"prompt": f"a{name}b"}), (CHAT, {"messages": user(f"a{name}b")})):
        counts = [
            client.post(path, json={**asked, "max_tokens": 1, "parse_special": special}).json()["usage"]
            for special in (False, True)
        ]
        assert counts[0]["prompt_tokens"] == counts[1]["prompt_tokens"] + len(name) - 1


def test_an_answer_may_be_kept_out_of_what_is_learned(client, tiny, monkeypatch):
    monkeypatch.setattr(tiny, "learning", True)
    empty, asked = tiny.session.read_shared(), {"messages": user("hello"), "max_tokens": 20, "ignore_eos": True}
    try:
        assert client.post(CHAT, json={**asked, "learning": False}).status_code == 200
        assert (tiny.session.read_shared()["learned"] == empty["learned"]).all()
        assert client.post(CHAT, json=asked).status_code == 200
        assert (tiny.session.read_shared()["learned"] != empty["learned"]).any()
    finally:
        tiny.session.write_shared(empty)


def test_keys_that_share_nothing_learn_nothing_of_each_other(tiny, monkeypatch):
    monkeypatch.setattr(tiny, "learning", True)
    empty, asked = tiny.session.read_shared(), {"messages": user("hello"), "max_tokens": 20, "ignore_eos": True}
    for keys, share, learns in ((("one", "two"), False, False), (("one",), False, True), (("one", "two"), True, True)):
        app = create_app({"tiny": tiny}, ServeOptions(api_keys=keys, share_prefixes=share))
        try:
            with TestClient(app, headers={"Authorization": "Bearer one"}) as client:
                assert client.post(CHAT, json={**asked, "learning": True}).status_code == 200
            assert (tiny.session.read_shared()["learned"] != empty["learned"]).any() == learns
        finally:
            tiny.session.write_shared(empty)


def test_empty_prompts(client):
    for prompt in ("", [], [[]]):
        assert refused(client.post(COMPLETIONS, json={"prompt": prompt}))["type"] == "invalid_request_error"


def test_several_models(client):
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny", "other"]
    for model, answered in ((None, "tiny"), ("other", "other")):
        got = client.post(COMPLETIONS, json={"model": model, "prompt": "hi", "max_tokens": 1}).json()
        assert got["model"] == answered
    assert refused(client.get("/v1/models/third"), 404)["code"] == "model_not_found"


def test_unknown_paths_and_methods_have_the_form_of_errors(client):
    refused(client.get("/v1/embeddings"), 404)
    refused(client.get(CHAT), 405)


def test_tokenize(client, tiny):
    got = client.post("/tokenize", json={"prompt": "hello"}).json()
    assert got == {"tokens": tiny.tokenizer.encode("hello"), "count": 5, "max_model_len": 192}
    got = client.post("/tokenize", json={"messages": user("hello")}).json()
    assert got["tokens"] == tiny.tokenizer.encode_messages(user("hello"))
    assert "prompt or messages" in refused(client.post("/tokenize", json={}))["message"]


def test_drafts_are_told_where_they_are_asked_for(client, tiny):
    asked = {"messages": user("abcabcabcabc"), "max_tokens": 80, "temperature": 0, "ignore_eos": True, "stream": True}
    expected = tiny.generate(user("abcabcabcabc"), 80, ignore_eos=True)
    told = []
    for line in client.post(CHAT, json={**asked, "stream_options": {"include_drafts": True}}).text.split("\n\n"):
        if line.startswith("data: {"):
            told += json.loads(line[6:])["specstep"]["steps"] if "specstep" in line else []
    assert len(told) == expected.stats["steps"]
    assert sum(len(step["tokens"]) for step in told) == 80
    assert "".join(text for step in told for text in step["tokens"]) == expected.text
    accepted = sum(int(depth) * steps for depth, steps in expected.stats["accepted"].items())
    assert sum(step["accepted"] for step in told) == accepted
    assert "specstep" not in client.post(CHAT, json=asked).text.replace('"model":"specstep"', "")


def test_token_bytes_make_up_the_text(tiny, tmp_path):
    text = TokenText(tiny.tokenizer)
    for said in ("hello wörld 日本 🙂", "\n\t "):
        assert b"".join(map(text.of, tiny.tokenizer.encode_part(said))).decode() == said
    assert text.of(0) == b"<s>" and text.of(5000) == b""


@pytest.fixture(scope="module")
def locked(tiny):
    options = ServeOptions(api_keys=("first-key", "second-key"), most_bytes=2000)
    with TestClient(create_app({"tiny": tiny}, options), raise_server_exceptions=False) as client:
        yield client


def test_keys(locked):
    asked = {"prompt": "hi", "max_tokens": 1}
    for headers in ({}, {"Authorization": "Bearer nope"}, {"Authorization": "first-key"}, {"Authorization": "Bearer "}):
        for response in (
            locked.post(COMPLETIONS, json=asked, headers=headers),
            locked.get("/v1/models", headers=headers),
            locked.get("/metrics", headers=headers),
            locked.get("/elsewhere", headers=headers),
        ):
            assert refused(response, 401)["code"] == "invalid_api_key"
            assert "nope" not in response.text and 'key"' not in response.text.replace("invalid_api_key", "")
    for key in ("first-key", "second-key"):
        response = locked.post(COMPLETIONS, json=asked, headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == 200
    for path in ("/", "/health", "/livez", "/readyz", "/docs", "/openapi.json"):
        assert locked.get(path).status_code == 200
    assert locked.get("/openapi.json").json()["components"]["securitySchemes"]


def test_keys_that_no_header_holds_are_refused():
    for key in ("", "two words", "schlüssel", "line\n"):
        with pytest.raises(InputError, match="api-key: expected printable ASCII"):
            ServeOptions(api_keys=(key,))


def test_an_open_server_of_one_machine_answers_to_its_own_names(tiny):
    options = ServeOptions(hosts=hosts_of("127.0.0.1", keys=False))
    with TestClient(create_app({"tiny": tiny}, options)) as client:
        for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000"):
            assert client.get("/v1/models", headers={"Host": host}).status_code == 200
        for host in ("rebound.example", "localhost.example:8000", "127.0.0.1.example", ""):
            refused(client.get("/v1/models", headers={"Host": host}), 403)
    assert hosts_of("127.0.0.1", keys=True) == hosts_of("0.0.0.0", keys=False) == ()


def test_large_bodies_are_refused_before_they_are_read(locked):
    key = {"Authorization": "Bearer first-key"}
    error = refused(locked.post(COMPLETIONS, json={"prompt": "x" * 3000}, headers=key), 413)
    assert error["code"] == "request_too_large"

    def parts():
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"x" * 100

    refused(locked.post(COMPLETIONS, content=parts(), headers=key | {"Content-Type": "application/json"}), 413)


def test_all_bodies_together_are_bounded(tiny):
    with TestClient(create_app({"tiny": tiny}, ServeOptions(most_held=1000))) as client:
        assert client.post(COMPLETIONS, json={"prompt": "hi", "max_tokens": 1}).status_code == 200
        for _ in range(3):
            refused(client.post(COMPLETIONS, json={"prompt": "x" * 1000, "max_tokens": 1}), 503)
        assert client.post(COMPLETIONS, json={"prompt": "hi", "max_tokens": 1}).status_code == 200


def test_metrics_and_logs_tell_no_prompt_and_no_key(tiny, caplog):
    options = ServeOptions(api_keys=("hidden-key",))
    key = {"Authorization": "Bearer hidden-key"}
    with caplog.at_level(logging.DEBUG), TestClient(create_app({"tiny": tiny}, options)) as client:
        client.post(COMPLETIONS, json={"prompt": "whispered", "max_tokens": 4, "temperature": 0}, headers=key)
        client.post(COMPLETIONS, json={"prompt": "whispered", "nonsense": "whispered"}, headers=key)
        client.get("/whispered", headers=key)
        client.request("WHISPERED", "/", headers=key)
        page = client.get("/metrics", headers=key).text
    logs = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("specstep"))
    assert "POST /v1/completions 200" in logs and "POST /v1/completions 400" in logs
    for text in (page, logs):
        assert "whispered" not in text.lower() and "hidden-key" not in text
    assert 'specstep_answers_total{model="tiny",reason="length"} 1.0' in page
    assert 'specstep_generated_tokens_total{model="tiny"} 4.0' in page
    assert 'specstep_rows{model="tiny"} 3.0' in page and 'specstep_waiting{model="tiny"} 0.0' in page


def test_prompts_are_logged_when_asked_for(tiny, caplog):
    with (
        caplog.at_level(logging.INFO),
        TestClient(create_app({"tiny": tiny}, ServeOptions(log_prompts=True))) as client,
    ):
        client.post(COMPLETIONS, json={"prompt": "spoken", "max_tokens": 1})
    assert "spoken" in caplog.text
