"""The official client of OpenAI, sync and async, against what the engine says by itself."""

import asyncio
from types import SimpleNamespace

import openai
import pytest
from served import PATIENCE, is_idle, until, user
from specstep.report import TokenLogprobs
from specstep.runtime.text.token_text import TokenText
from specstep.runtime.text.tokenizer import EngineTokenizer, TextStream
from specstep.serving import prepare
from specstep.serving.forms import CompletionForm
from tokenizers import Tokenizer, decoders, models

WARM = {"temperature": 0.9, "seed": 11}


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def aclient(address):
    return openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


def joined(chunks, index=0):
    """The text of a choice, and why it ended."""
    parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    reasons = [part.finish_reason for part in parts if part.finish_reason]
    assert len(reasons) == 1 and parts[-1].finish_reason, "ends once, at the end"
    return "".join(part.delta.content or "" for part in parts), reasons[0]


def test_a_chat(client, tiny):
    expected = tiny.generate(user("hello"), 30, sampling=WARM)
    got = client.chat.completions.create(model="tiny", messages=user("hello"), max_completion_tokens=30, **WARM)
    assert got.object == "chat.completion" and got.model == "tiny" and got.id.startswith("chatcmpl-")
    assert got.choices[0].message.role == "assistant"
    assert (got.choices[0].message.content, got.choices[0].finish_reason) == (expected.text, expected.finish_reason)
    assert got.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert got.usage.completion_tokens == len(expected.token_ids)
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens
    assert got.usage.completion_tokens_details is None, "there was no prediction that could have been accepted"


@pytest.mark.parametrize(
    "content", ["bot: hello", [{"type": "text", "text": "bot: "}, {"type": "text", "text": "hello"}]]
)
def test_a_prediction_changes_no_text(client, tiny, content):
    expected = tiny.generate(user("hello"), 30, sampling=WARM, prediction="bot: hello")
    likely = {"type": "content", "content": content}
    asked = {"model": "tiny", "messages": user("hello"), "max_tokens": 30, "prediction": likely, **WARM}
    got = client.chat.completions.create(**asked)
    assert got.choices[0].message.content == expected.text
    told = got.usage.completion_tokens_details
    assert told.accepted_prediction_tokens == expected.stats["accepted_prediction_tokens"]
    assert told.accepted_prediction_tokens + told.rejected_prediction_tokens == len("bot: hello")
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert joined(chunks[:-1])[0] == expected.text and chunks[-1].usage.completion_tokens_details == told


@pytest.mark.parametrize(
    ("prediction", "param", "message"),
    [
        ({"type": "content", "content": "x" * 2000}, "prediction", "expected at most"),
        ({"type": "image", "content": "x"}, "prediction.type", "input should be 'content'"),
        (
            {"type": "content", "content": [{"type": "image_url"}]},
            "prediction.content[0].type",
            "input should be 'text'",
        ),
        ("text", "prediction", "input should be"),
    ],
)
def test_a_prediction_that_cannot_be_taken_is_refused_by_name(client, prediction, param, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.chat.completions.create(model="tiny", messages=user("hello"), prediction=prediction)
    assert caught.value.param == param


def test_a_stream_is_the_whole_answer(client, tiny):
    expected = tiny.generate(user("hello"), 30, sampling=WARM)
    options = {"include_usage": True}
    asked = {"model": "tiny", "messages": user("hello"), "max_tokens": 30, **WARM}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    assert joined(chunks[:-1]) == (expected.text, expected.finish_reason)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(expected.token_ids)
    assert all(chunk.usage is None for chunk in chunks[:-1]) and len({chunk.id for chunk in chunks}) == 1
    without = list(client.chat.completions.create(**asked, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in without)


def test_each_chunk_may_have_the_usage_so_far(client):
    """guidellm asks for it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"model": "tiny", "messages": user("hello"), "max_tokens": 30, "temperature": 0.0}
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == last.usage.completion_tokens


@pytest.mark.parametrize(
    ("template", "effort", "expected"),
    [
        ("{{ reasoning_effort }}", "high", {"reasoning_effort": "high"}),
        ("{{ enable_thinking }}", "none", {"enable_thinking": False}),
        ("{{ enable_thinking }}", "low", {"enable_thinking": True}),
        ("{{ messages }}", "none", {}),
        ("{{ reasoning_effort }}", None, {}),
    ],
)
def test_effort_reaches_the_template(template, effort, expected):
    served = SimpleNamespace(name="m", tokenizer=SimpleNamespace(chat_template=template))
    assert prepare._of_effort(served, effort) == expected


def test_effort_that_no_template_knows_is_refused(client):
    with pytest.raises(openai.BadRequestError, match=r"reasoning_effort: expected none for tiny, .* got high"):
        client.chat.completions.create(model="tiny", messages=user("hello"), reasoning_effort="high")
    client.responses.create(model="tiny", input="hello", reasoning={"effort": "high"}, max_output_tokens=1)


def test_a_step_is_one_chunk_of_whole_characters(client, tiny):
    """The tiny model writes bytes at random: most of its characters are halves, and never shown as such twice."""
    expected = tiny.generate(user("abcabcabc"), 60, sampling={"temperature": 0}, ignore_eos=True)
    stream = client.chat.completions.create(
        model="tiny", messages=user("abcabcabc"), max_tokens=60, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    chunks = list(stream)
    assert joined(chunks)[0] == expected.text
    assert len(chunks) <= 2 + expected.stats["steps"]


def test_several_choices(client, tiny):
    sampling = {"temperature": 1.2, "seed": 5, "n": 4}
    expected = [choice.text for choice in tiny.generate(user("hello"), 12, sampling=sampling).choices]
    asked = {"model": "tiny", "messages": user("hello"), "max_tokens": 12, **sampling}
    whole = client.chat.completions.create(**asked)
    assert [choice.message.content for choice in whole.choices] == expected
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert [joined(chunks, index)[0] for index in range(4)] == expected


def test_logprobs_of_a_chat(client, tiny):
    expected = tiny.generate(user("hello"), 8, sampling={"temperature": 0, "logprobs": 3})
    asked = {"messages": user("hello"), "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(model="tiny", **asked).choices[0].logprobs.content
    streamed = [
        token
        for chunk in client.chat.completions.create(model="tiny", **asked, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content
    ]
    for content in (whole, streamed):
        assert [token.logprob for token in content] == [each.logprob for each in expected.logprobs]
        assert [[top.logprob for top in token.top_logprobs] for token in content] == [
            [logprob for _, logprob in each.top] for each in expected.logprobs
        ]
        written = b"".join(bytes(token.bytes) for token in content)
        assert written.decode("utf-8", "replace") == expected.text


def test_completions(client, tiny):
    prompts = ["hello", "abc abc abc"]
    sampling = {"temperature": 0.8, "seed": 3, "n": 2}
    expected = [
        prompt + choice.text for prompt in prompts for choice in tiny.generate(prompt, 16, sampling=sampling).choices
    ]
    got = client.completions.create(model="tiny", prompt=prompts, echo=True, **sampling)
    assert [choice.text for choice in got.choices] == expected
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3] and got.object == "text_completion"
    texts = ["", "", "", ""]
    for chunk in client.completions.create(model="tiny", prompt=prompts, echo=True, stream=True, **sampling):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_completions_of_token_ids_with_logprobs(client, tiny):
    expected = tiny.generate([40, 41, 42], 6, sampling={"logprobs": 2})
    got = client.completions.create(model="tiny", prompt=[40, 41, 42], max_tokens=6, temperature=0, logprobs=2)
    told = got.choices[0].logprobs
    assert got.choices[0].text == expected.text
    assert told.token_logprobs == [each.logprob for each in expected.logprobs]
    assert [sorted(top.values()) for top in told.top_logprobs] == [
        sorted(logprob for _, logprob in each.top) for each in expected.logprobs
    ]
    written = TextStream(tiny.tokenizer)
    shown = [len(written.push([token])) for token in expected.token_ids]
    assert told.text_offset == [sum(shown[:at]) for at in range(len(shown))]


def test_text_offsets_are_those_of_the_text():
    """Though the first word's space is not in it, and a token may be a part of a character."""
    vocabulary = {token: index for index, token in enumerate(["▁the", "▁cat", "<0xE2>", "<0x82>", "<0xAC>", "s"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    form = CompletionForm(TokenText(EngineTokenizer(tokenizer, None, {})), 0, [])
    logprobs = [TokenLogprobs(token, -1.0, ()) for token in (0, 1, 2, 3, 4, 5)]
    told = form.grown(0, "the cat", logprobs[:2])["logprobs"]["text_offset"]
    told += form.grown(0, "€s", logprobs[2:])["logprobs"]["text_offset"]
    assert told == [0, 3, 7, 7, 7, 8]
    assert form.grown(1, "the", logprobs[:1])["logprobs"]["text_offset"] == [0], "each choice has its own text"


def test_the_token_itself_is_among_the_likely_ones():
    """OpenAI's field has it beside so many others: a sampled one may be none of the likeliest."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    form = CompletionForm(TokenText(EngineTokenizer(tokenizer, None, {})), 1, [])
    told = form.grown(0, "b", [TokenLogprobs(1, -3.0, ((0, -0.1),))])["logprobs"]
    assert told["tokens"] == ["b"] and told["top_logprobs"] == [{"a": -0.1, "b": -3.0}]


def test_seeds_of_any_size(client, tiny):
    """Those of 128 bits, as of a UUID, count modulo 2**63, in chats and completions."""
    expected = tiny.generate(user("hello"), 12, sampling={"temperature": 0.9, "seed": 11}).text
    completed = tiny.generate("hello", 12, sampling={"temperature": 0.9, "seed": 11}).text
    for seed in (11, 2**63 + 11, 2**64 + 11, 11 - 2**63, 2**127 + 11):
        asked = {"model": "tiny", "max_tokens": 12, "temperature": 0.9, "extra_body": {"seed": seed}}
        got = client.chat.completions.create(messages=user("hello"), **asked)
        assert got.choices[0].message.content == expected
        assert client.completions.create(prompt="hello", **asked).choices[0].text == completed


def test_stop_strings_and_stop_tokens(client, tiny):
    free = tiny.generate(user("hello"), 40, sampling=WARM, ignore_eos=True)
    stop = free.text[len(free.text) // 2 :][:2]
    cut = tiny.generate(user("hello"), 40, sampling=WARM | {"stop": stop}, ignore_eos=True)
    asked = {"model": "tiny", "messages": user("hello"), "max_tokens": 40, "extra_body": {"ignore_eos": True}, **WARM}
    got = client.chat.completions.create(**asked, stop=[stop]).choices[0]
    assert (got.message.content, got.finish_reason) == (cut.text, "stop")
    assert joined(list(client.chat.completions.create(**asked, stop=stop, stream=True))) == (cut.text, "stop")
    token = free.token_ids[5]
    cut = tiny.generate(user("hello"), 40, sampling=WARM, stop_ids=[token], ignore_eos=True)
    asked["extra_body"] |= {"stop_token_ids": [token]}
    got = client.chat.completions.create(**asked)
    assert got.choices[0].message.content == cut.text and got.usage.completion_tokens == len(cut.token_ids)


def test_every_sampling_option_reaches_the_engine(client, tiny):
    shared = {
        "temperature": 1.4, "top_p": 0.95, "presence_penalty": 0.3, "frequency_penalty": 0.2, "seed": 4,
        "logit_bias": {"70": 2.5},
    }  # fmt: skip
    extra = {"top_k": 60, "min_p": 0.01, "repetition_penalty": 1.3, "bad_words": ["a", "bc"]}
    sampling = {**shared, **extra, "min_new_tokens": 9}
    expected = tiny.generate(user("hello"), 40, sampling=sampling)
    body = {**extra, "min_tokens": 9}
    got = client.chat.completions.create(model="tiny", messages=user("hello"), max_tokens=40, **shared, extra_body=body)
    assert got.choices[0].message.content == expected.text
    for name in sampling:
        without = {key: value for key, value in sampling.items() if key != name}
        if (
            name not in ("seed", "min_new_tokens")
            and tiny.generate(user("hello"), 40, sampling=without).text != expected.text
        ):
            break
    else:
        pytest.fail("no option changes the text")


def test_a_temperature_that_is_not_given_is_that_of_openai(client, tiny):
    expected = tiny.generate(user("hello"), 20, sampling={"temperature": 1, "seed": 2}).text
    got = client.chat.completions.create(model="tiny", messages=user("hello"), max_tokens=20, seed=2)
    assert got.choices[0].message.content == expected


def test_an_answer_can_be_sent_back(client, tiny):
    first = client.chat.completions.create(model="tiny", messages=user("hi"), max_tokens=5, temperature=0)
    messages = [*user("hi"), first.choices[0].message, *user("and you?")]
    second = client.chat.completions.create(model="tiny", messages=messages, max_tokens=9, temperature=0)
    plain = [*user("hi"), {"role": "assistant", "content": first.choices[0].message.content}, *user("and you?")]
    assert second.choices[0].message.content == tiny.generate(plain, 9).text


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "specstep"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("a/b")
    assert error.value.code == "model_not_found" and error.value.param == "model"


def test_errors_are_those_of_openai(client):
    def create(**asked):
        return client.chat.completions.create(**{"model": "tiny", "messages": user("hi")} | asked)

    with pytest.raises(openai.NotFoundError) as error:
        create(model="gpt-none")
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as error:
        create(messages=user("x" * 400))
    assert error.value.code == "context_length_exceeded" and error.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as error:
        create(modalities=["audio"])
    assert error.value.param == "modalities" and "not supported" in str(error.value)
    with pytest.raises(openai.BadRequestError) as error:
        create(temperature=0.001)
    assert error.value.param == "temperature"


def test_leaving_a_stream_frees_its_row(client, tiny):
    asked = {"model": "tiny", "messages": user("hello"), "stream": True, "extra_body": {"ignore_eos": True}}
    with client.chat.completions.create(**asked) as stream:
        next(stream)
    until(lambda: is_idle(tiny))


def test_async(aclient, tiny):
    texts = ["hello", "abc abc", "x" * 40, "1 2 3"]
    expected = [tiny.generate(user(text), 24, sampling=WARM).text for text in texts]

    async def stream(text):
        asked = {"model": "tiny", "messages": user(text), "max_tokens": 24, **WARM}
        return joined([chunk async for chunk in await aclient.chat.completions.create(**asked, stream=True)])[0]

    async def all_of_them():
        return await asyncio.gather(*map(stream, texts))

    assert asyncio.run(all_of_them()) == expected


def test_async_cancel(aclient, tiny):
    async def leave():
        asked = {"model": "tiny", "messages": user("hello"), "extra_body": {"ignore_eos": True}}
        stream = await aclient.chat.completions.create(**asked, stream=True)
        async for _ in stream:
            break
        await stream.close()
        task = asyncio.ensure_future(aclient.chat.completions.create(**asked))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    until(lambda: is_idle(tiny))
