"""Prompts that begin like earlier ones start from what was kept, and with keys each from its own."""

import pytest
import specstep
from fastapi.testclient import TestClient
from served import user
from specstep.serving.app import create_app
from specstep.serving.options import ServeOptions

ENGINE = {"drafter": "ngram", "dtype": "float32", "max_batch": 2, "max_seq_len": 192, "prefill_chunk": 16}
LONG = "a b c d e f g h i j k l m n o p q r s t u v w x y z and so on and so on"


@pytest.fixture
def keeping(model_folder):
    with specstep.eager(str(model_folder), prefix_cache_bytes=2**24, **ENGINE) as engine:
        yield engine


def ask(client, key=None, **asked):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"max_tokens": 8, "temperature": 0, **asked}
    response = client.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    got = response.json()
    return got["choices"][0]["message"]["content"], got["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_the_turns_before_are_not_prefilled_again(keeping, tiny):
    with TestClient(create_app({"tiny": keeping})) as client:
        first, cached = ask(client, messages=user(LONG))
        assert (first, cached) == (tiny.generate(user(LONG), 8).text, 0)
        messages = [*user(LONG), {"role": "assistant", "content": first}, *user("and?")]
        second, cached = ask(client, messages=messages)
        assert second == tiny.generate(messages, 8).text and cached > 60
        page = client.get("/metrics").text
    assert f'specstep_cached_prompt_tokens_total{{model="tiny"}} {cached}.0' in page


def test_cached_tokens_are_counted_once_for_each_prompt(keeping):
    with TestClient(create_app({"tiny": keeping})) as client:
        ask(client, messages=user(LONG))
        _, once = ask(client, messages=user(LONG))
        _, cached = ask(client, messages=user(LONG), n=3, temperature=1)
    assert 0 < once == cached


@pytest.mark.parametrize("shared", [False, True])
def test_one_key_s_prompts_serve_another_s_only_where_that_is_allowed(keeping, shared):
    options = ServeOptions(api_keys=("one", "two"), share_prefixes=shared)
    with TestClient(create_app({"tiny": keeping}, options)) as client:
        said = [ask(client, key, messages=user(LONG)) for key in ("one", "two", "one")]
    assert len({text for text, _ in said}) == 1
    assert [cached > 0 for _, cached in said] == [False, shared, True]
