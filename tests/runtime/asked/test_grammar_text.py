"""Texts under a grammar: those of plain decoding under the same grammar, whatever is drafted."""

import re
from itertools import product

import pytest
import specstep
import torch
from grammars import EOS, GRAMMARS, PERSON, VOCABULARY, PlainDecoding, allowed_after, check, plain_matcher
from specstep import SamplingParams
from transformers import AutoModelForCausalLM

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [104, 101, 108]]
DRAFTERS = {"ngram": "ngram", "draft model": "DRAFTER", "head": "HEAD", "mixed": "ngram,HEAD"}
TREES = ("chain", "static", "dynamic")
# Every grammar once, and all drafters, trees and batches in turn.
QUICK = [
    ("none", None, 1, GRAMMARS[::8]),
    ("ngram", "dynamic", 4, GRAMMARS),
    ("draft model", "chain", 4, GRAMMARS[1::8]),
    ("head", "dynamic", 4, GRAMMARS[2::8]),
    ("head", "static", 1, GRAMMARS[3::8]),
    ("mixed", "static", 4, GRAMMARS[4::8]),
    ("mixed", "chain", 1, GRAMMARS[5::8]),
]
ALL = [("none", None, rows, GRAMMARS) for rows in (1, 4)]
ALL += [(*each, GRAMMARS) for each in product(DRAFTERS, TREES, (1, 4))]


@pytest.fixture(scope="module")
def reference(model_folder):
    return PlainDecoding(model_folder)


@pytest.fixture(scope="module")
def compare(reference, model_folder, drafter_folder, head_folder):
    """Runs grammars on an engine of a drafter, a tree and so many rows, and compares each text with plain decoding."""
    places = {"DRAFTER": str(drafter_folder), "HEAD": str(head_folder)}

    def run(drafter, tree, rows, asked):
        """asked: prompts and grammars."""
        named = re.sub("DRAFTER|HEAD", lambda found: places[found[0]], DRAFTERS.get(drafter, "none"))
        options = {"dtype": "float32", "max_seq_len": 160, "max_batch": rows, "drafter": named, "tree": tree}
        with specstep.eager(str(model_folder), **options) as engine:
            sampling = [SamplingParams(structured=structured) for _, structured in asked]
            results = engine.generate([prompt for prompt, _ in asked], 40, sampling=sampling)
        for (prompt, structured), result in zip(asked, results, strict=True):
            assert result.token_ids == reference(prompt, structured, 40), structured
            assert result.finish_reason == ("stop" if result.token_ids[-1] == EOS else "length")

    return run


def name_of(case):
    return "-".join(map(str, case[:3]))


@pytest.mark.parametrize("case", QUICK, ids=name_of)
def test_the_text_is_that_of_plain_decoding_under_the_grammar(case, compare):
    *options, grammars = case
    compare(*options, [(PROMPTS[number % 2], structured) for number, structured in enumerate(grammars)])


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=name_of)
def test_with_every_drafter_tree_and_batch(case, compare):
    *options, grammars = case
    compare(*options, list(product(PROMPTS, grammars)))


@pytest.fixture(scope="module")
def engine(engine_folder):
    with specstep.load(engine_folder) as opened:
        yield opened


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_what_ends_is_whole(engine, temperature):
    """Sampled widely, from a model that knows nothing: each text that ends is in its language."""
    ended = 0
    for structured in GRAMMARS[::2]:
        sampling = SamplingParams(structured=structured, temperature=temperature, seed=3, n=2 if temperature else 1)
        result = engine.generate([7, 8], 90, sampling=sampling)
        for each in result if isinstance(result, list) else [result]:
            if each.finish_reason == "stop":
                ended += 1
                check(structured, each.text)
    assert ended >= 8


def test_sampled_texts_are_those_without_drafts(engine, model_folder):
    sampling = [SamplingParams(structured=each, temperature=0.9, seed=seed) for seed, each in enumerate(GRAMMARS[::4])]
    drafted = engine.generate([PROMPTS[0]] * len(sampling), 40, sampling=sampling)
    with specstep.eager(str(model_folder), dtype="float32", drafter="none", max_seq_len=160) as plain:
        for each, result in zip(sampling, drafted, strict=True):
            assert plain.generate(PROMPTS[0], 40, sampling=each).token_ids == result.token_ids


@pytest.mark.parametrize("backend", ["eager", "inductor", "onnx"])
def test_log_probabilities_are_those_of_the_masked_distribution(backend, model_folder, request):
    """Each place's, among what the grammar allows there, as transformers' logits have it; a row beside it without a
    grammar has those of all tokens."""
    if backend == "eager":
        opened = specstep.eager(str(model_folder), drafter="ngram", dtype="float32", max_batch=2, max_seq_len=192)
    else:
        opened = specstep.load(request.getfixturevalue("engine_folder" if backend == "inductor" else "onnx_folder"))
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    forced = 0
    with opened as engine, torch.no_grad():
        for structured in ({"json": PERSON}, {"regex": "[a-f]{2}x(yz|wv)[0-9]"}, None):
            sampling = [SamplingParams(structured=structured, logprobs=5), SamplingParams(logprobs=5)]
            results = engine.generate(PROMPTS, 24, sampling=sampling)
            for grammar, prompt, result in zip((structured, None), PROMPTS, results, strict=True):
                logits = model(torch.tensor([prompt + result.token_ids])).logits[0, len(prompt) - 1 :]
                for place, told in enumerate(result.logprobs):
                    written, allowed = result.token_ids[:place], list(range(VOCABULARY))
                    if grammar:
                        allowed = allowed_after(plain_matcher(grammar), written)
                    masked = torch.full((VOCABULARY,), -torch.inf).index_copy(
                        0, torch.tensor(allowed), logits[place, allowed]
                    )
                    expected = masked.log_softmax(-1)
                    assert told.logprob == pytest.approx(expected[told.token_id].item(), abs=1e-4)
                    best = expected.sort(descending=True, stable=True).indices[: min(5, len(allowed))].tolist()
                    assert [token for token, _ in told.top] == best
                    assert [each for _, each in told.top] == pytest.approx(expected[best].tolist(), abs=1e-4)
                    forced += len(allowed) == 1
    assert forced > 5
