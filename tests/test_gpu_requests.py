"""On an NVIDIA GPU: what requests ask for is kept there, too. Run by `make gpu-check`, with engines of test_gpu.py."""

import threading

import pytest
import specstep
import torch
from gpu_case import NEW_TOKENS, PROMPTS, engine_of, expected_answers, options_of
from grammars import GRAMMARS, PlainDecoding, check
from models import tiny_model
from served import post, running, user
from specstep.serving.app import create_app

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SAMPLED = [
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "seed": 2**40 + 7},
    {"temperature": 0.7, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.3, "seed": 11},
    {
        "temperature": 1.0,
        "frequency_penalty": 0.2,
        "logit_bias": {50: 1.5, 60: -100.0},
        "min_new_tokens": 30,
        "seed": 3,
    },
]
OBJECT = {"response_format": {"type": "json_object"}}
DRAFTED = ["ngram", "right dynamic", "head chain", "head static", "head dynamic", "mixed dynamic"]


@pytest.fixture
def opened(model_folder, head_folder, tmp_path):
    """`opened(choice, **options)`: its engine in float32, loaded with these options."""
    engines = []

    def load(choice, **options):
        built = options_of(choice, head_folder, model_folder)
        folder = engine_of(f"{choice}-float32", model_folder, tmp_path / choice, dtype="float32", **built)
        engines.append(specstep.load(folder, **({"nodes": "all", "learning": False} | options)))
        return engines[-1]

    yield load
    for engine in engines:
        engine.close()


def sampled(engine, at_once):
    """Tokens of each prompt with each kind of sampling, so many rows at a time."""
    asked = [(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLED]
    groups = [asked[start : start + at_once] for start in range(0, len(asked), at_once)]
    return [
        result.token_ids
        for group in groups
        for result in engine.generate(
            [prompt for prompt, _ in group], NEW_TOKENS, sampling=[sampling for _, sampling in group]
        )
    ]


@pytest.mark.parametrize("choice", DRAFTED)
def test_sampled_texts_are_those_without_drafts(choice, opened):
    plain = sampled(opened("none"), 8)
    assert len({tuple(tokens) for tokens in plain}) > len(PROMPTS) * 3
    drafted = opened(choice)
    for at_once in (1, 5, 8):
        assert sampled(drafted, at_once) == plain, f"{at_once} at a time"


@pytest.mark.parametrize("choice", ["none", *DRAFTED])
def test_structured_texts_are_those_of_plain_decoding(choice, opened, model_folder):
    """Greedy under each grammar: what transformers says where a matcher masks each token."""
    plain, engine = PlainDecoding(model_folder), opened(choice)
    asked = [{"structured": structured} for structured in GRAMMARS]
    prompts = [PROMPTS[place % len(PROMPTS)] for place in range(len(asked))]
    results = engine.generate(prompts, 60, sampling=asked)
    for prompt, structured, result in zip(prompts, GRAMMARS, results, strict=True):
        assert result.token_ids == plain(prompt, structured, 60), structured
        if result.finish_reason == "stop":
            check(structured, result.text)
    assert sum(result.finish_reason == "stop" for result in results) > len(GRAMMARS) // 2


@torch.no_grad()
@pytest.mark.parametrize("choice", ["none", "head dynamic"])
def test_log_probabilities_are_those_of_transformers(choice, opened):
    model = tiny_model("Llama")
    for prompt, result in zip(PROMPTS, opened(choice).generate(PROMPTS, 20, sampling={"logprobs": 5}), strict=True):
        said = torch.tensor(result.token_ids)
        scores = model(torch.tensor([prompt + result.token_ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        for place, told in enumerate(result.logprobs):
            assert told.logprob == pytest.approx(float(scores[place, said[place]]), abs=1e-3)
            assert [score for _, score in told.top] == pytest.approx(scores[place].topk(5).values.tolist(), abs=1e-3)
            assert told.top[0][0] == said[place]


def test_kept_prefixes_change_no_text(opened):
    """Turns of a conversation: each prompt is the last one and its answer, in the blocks that were kept."""
    plain, keeps = opened("head dynamic"), opened("head dynamic", prefix_cache_bytes=1 << 24)
    tokens, cached = list(range(30, 83)), 0
    for turn in range(3):
        result = keeps.generate(tokens, 20, ignore_eos=True)
        assert result.token_ids == plain.generate(tokens, 20, ignore_eos=True).token_ids, f"turn {turn}"
        cached += result.stats["cached_tokens"]
        tokens = tokens + result.token_ids + [40 + turn]
    assert cached > 100


def test_requests_that_come_and_leave(opened):
    """More than there are rows, a thread each; every third leaves after its first piece."""
    engine, expected, failures = opened("mixed dynamic"), expected_answers("Llama"), []

    def visit(number):
        try:
            told, tokens = expected[number % len(PROMPTS)], []
            with engine.submit(engine.request(PROMPTS[number % len(PROMPTS)], NEW_TOKENS)) as stream:
                for piece in stream:
                    tokens += piece.token_ids
                    if number % 3 == 2:
                        break
            assert tokens == (told[: len(tokens)] if number % 3 == 2 else told)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=visit, args=[number]) for number in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not any(thread.is_alive() for thread in threads), failures


def test_a_server_says_what_the_engine_says(opened):
    engine = opened("head dynamic")
    with running(create_app({"tiny": engine})) as url:
        for temperature, sent, structured in ((0.0, {}, None), (0.8, {}, None), (0.8, OBJECT, {"json_object": True})):
            asked = {
                "model": "tiny",
                "messages": user("hello"),
                "max_tokens": 30,
                "seed": 4,
                "temperature": temperature,
            }
            [choice] = post(url, "/v1/chat/completions", **asked, **sent).json()["choices"]
            sampling = {"temperature": temperature, "seed": 4, "structured": structured}
            said = engine.generate(user("hello"), 30, sampling=sampling)
            assert (choice["message"]["content"], choice["finish_reason"]) == (said.text, said.finish_reason)
