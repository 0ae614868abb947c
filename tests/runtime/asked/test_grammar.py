"""Structured output: the text of plain decoding under the same grammar, whatever is drafted."""

import json
import re
import sys

import numpy as np
import pytest
import specstep
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import validate
from llguidance import LLMatcher, LLTokenizer
from models import tiny_tokenizer
from specstep import DraftedTree, InputError, MissingPackageError, SamplingParams
from specstep.runtime.asked.grammar import Grammar, GrammarMasks
from specstep.runtime.asked.sampling_params import ELSEWHERE
from specstep.runtime.asked.structured import checked_structured
from specstep.runtime.text.tokenizer import EngineTokenizer
from transformers import AutoModelForCausalLM

EOS, VOCABULARY = 1, 320
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMARS = [
    {"json": PERSON},
    {"json": json.dumps({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4})},
    {"json": {"enum": [1, "two", None, [3]]}},
    {"json": {"anyOf": [{"const": "x"}, {"type": "integer", "minimum": 10, "maximum": 12}]}},
    {"json": {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"n": {}}, "required": ["n"]}}}},
    {"json_object": True},
    {"regex": "[0-9]{4}-[0-9]{2}-[0-9]{2}"},
    {"regex": r"(ab|a)*c?"},
    {"regex": "[é-ü]{1,4}"},
    {"choice": ["yes", "no", "yes, of course"]},
    {"choice": ['a "quoted" one', "line\nend", "日本"]},
    {"grammar": 'root ::= item ("," item)*\nitem ::= [0-9]+ | "(" root ")"'},
    {"grammar": 'start: "<" /[a-z]{2,3}/ ">" | "-"'},
    {"grammar": 'root ::= "x"+'},
]  # fmt: skip
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [104, 101, 108]]
DRAFTERS = {
    "none": {"drafter": "none"},
    "ngram": {"drafter": "ngram"},
    "draft model": {"drafter": "DRAFTER", "tree": "chain"},
    "head": {"drafter": "HEAD", "tree": "dynamic"},
    "mixed": {"drafter": "ngram,HEAD", "max_batch": 4},
}


def test_the_names_of_other_systems_lead_here():
    assert {name for name, here in ELSEWHERE.items() if here == "structured"} >= {"structured_outputs"}


@pytest.fixture(scope="module")
def reference(model_folder):
    """The greedy text of transformers, each token masked by a matcher that read all tokens anew."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    tokenizer = LLTokenizer(tiny_tokenizer().backend_tokenizer.to_str(), n_vocab=VOCABULARY, eos_token=[EOS])

    @torch.no_grad()
    def continuation(prompt, structured, most):
        grammar, output = compiled(structured), []
        while len(output) < most and EOS not in output:
            allowed = allowed_after(LLMatcher(tokenizer, grammar), output)
            logits = model(torch.tensor([prompt + output])).logits[0, -1]
            output.append(max(allowed, key=lambda token: float(logits[token])))
        return output

    return continuation


def compiled(structured):
    """llguidance's form, made here once more."""
    from specstep.runtime.asked.grammar import _compiled

    return _compiled(checked_structured("structured", structured))


def allowed_after(matcher, tokens):
    assert matcher.consume_tokens(list(tokens)) or not tokens
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return np.flatnonzero(bits[:VOCABULARY]).tolist()


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_text_is_that_of_plain_decoding_under_the_grammar(
    name, reference, model_folder, drafter_folder, head_folder
):
    places = {"DRAFTER": str(drafter_folder), "HEAD": str(head_folder)}
    options = {"dtype": "float32", "max_seq_len": 160, "max_batch": 1, **DRAFTERS[name]}
    options["drafter"] = re.sub("DRAFTER|HEAD", lambda found: places[found[0]], options["drafter"])
    with specstep.eager(str(model_folder), **options) as engine:
        for structured in GRAMMARS if name in ("ngram", "mixed") else GRAMMARS[::3]:
            sampling = SamplingParams(structured=structured)
            results = engine.generate(PROMPTS, 40, sampling=sampling)
            for prompt, result in zip(PROMPTS, results, strict=True):
                assert result.token_ids == reference(prompt, structured, 40), structured
                assert result.finish_reason == ("stop" if result.token_ids[-1] == EOS else "length")


@pytest.fixture(scope="module")
def engine(engine_folder):
    with specstep.load(engine_folder) as opened:
        yield opened


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_what_ends_is_whole(engine, temperature):
    """Sampled widely, from a model that knows nothing: each text that ends is in its language."""
    ended = 0
    for structured in GRAMMARS:
        sampling = SamplingParams(structured=structured, temperature=temperature, seed=3, n=4 if temperature else 1)
        result = engine.generate([7, 8], 90, sampling=sampling)
        for each in result if isinstance(result, list) else [result]:
            if each.finish_reason == "stop":
                ended += 1
                check(structured, each.text)
    assert ended >= 8


def check(structured, text):
    kind, value = next(iter(structured.items()))
    if kind == "json":
        validate(json.loads(text), json.loads(value) if isinstance(value, str) else value)
    elif kind == "json_object":
        assert isinstance(json.loads(text), dict)
    elif kind == "regex":
        assert re.fullmatch(value, text)
    elif kind == "choice":
        assert text in value


def test_sampled_texts_are_those_without_drafts(engine, model_folder):
    sampling = [SamplingParams(structured=each, temperature=0.9, seed=seed) for seed, each in enumerate(GRAMMARS[::2])]
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
    tokenizer = LLTokenizer(tiny_tokenizer().backend_tokenizer.to_str(), n_vocab=VOCABULARY, eos_token=[EOS])
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
                        allowed = allowed_after(LLMatcher(tokenizer, compiled(grammar)), written)
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


MANY = {"regex": "a{3}b*"}


@pytest.mark.parametrize(
    ("sampling", "options", "text"),
    [
        ({}, {}, r"aaab*"),  # ends as the model likes
        ({"min_new_tokens": 9}, {}, r"aaab{6,}"),
        ({"min_new_tokens": 9, "structured": {"choice": ["aa"]}}, {}, "aa"),  # nothing else may follow
        ({}, {"ignore_eos": True}, r"aaab{17}"),
        ({"structured": {"choice": ["aa"]}}, {"ignore_eos": True}, "aa"),
        ({"stop": "bb"}, {"ignore_eos": True}, r"aaa"),
        ({"structured": {"regex": "a{3}[bc]*"}}, {"stop_ids": ["c"]}, r"aaab*c?"),
    ],
)
def test_ends(sampling, options, text, engine, model_folder):
    """EOS and stop ids come where the grammar may end, after `min_new_tokens` and with `ignore_eos` where it must."""
    if "stop_ids" in options:
        options = options | {"stop_ids": [tiny_tokenizer().convert_tokens_to_ids("c")]}
    result = engine.generate([9], 20, sampling=SamplingParams(**({"structured": MANY} | sampling)), **options)
    assert re.fullmatch(text, result.text), result.text


def test_a_grammar_that_fails_ends_its_request_alone(engine, monkeypatch):
    calls = []

    def failing(masks, output, tree, follow=GrammarMasks.__call__):
        calls.append(len(output))
        if len(calls) > 1:
            raise InputError("structured: it fails")
        return follow(masks, output, tree)

    monkeypatch.setattr(GrammarMasks, "__call__", failing)
    free = engine.generate([5, 6, 7], 30, ignore_eos=True).token_ids
    beside = engine.submit(engine.request([5, 6, 7], 30, ignore_eos=True))
    with pytest.raises(InputError, match="it fails"):
        engine.generate([9], 60, sampling=SamplingParams(structured=MANY), ignore_eos=True)  # more than a step's
    assert [token for piece in beside for token in piece.token_ids] == free and calls


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        ("json", "structured: expected a mapping with one of json, json_object, regex, choice, grammar, got 'json'"),
        ({}, "structured: expected one of json, .*, and perhaps lenient or whole, got none"),
        ({"regex": "a", "choice": ["a"]}, "structured: expected one of .*, got 'regex', 'choice'"),
        ({"structural_tag": {}}, "got 'structural_tag'"),
        ({"json": "{"}, "structured: json: expected a JSON schema"),
        ({"json": [1]}, r"structured: json: expected a JSON schema, an object, got \[1\]"),
        ({"regex": ""}, "structured: regex: expected a text that is not empty"),
        ({"choice": []}, "structured: choice: expected a list of texts, at least one"),
        ({"choice": [3]}, r"structured: choice\[0\]: expected a text"),
        ({"json_object": 1}, "structured: json_object: expected True, got 1"),
        ({"json_object": True, "lenient": 1}, "lenient: expected True or False"),
        ({"regex": "a", "whole": "yes"}, "whole: expected True or False"),
        ({"regex": "(a"}, "structured: expected a grammar that can be kept, got: .*unclosed group"),
        ({"grammar": "start: missing"}, "structured: expected a grammar that can be kept, got: .*missing"),
        ({"json": False}, "structured: json: expected a schema that some document keeps"),
        ({"json": {"type": "object", "unevaluatedProperties": False}}, "Unimplemented keys.*unevaluatedProperties"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "structured: expected a grammar"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(structured, message, engine):
    with pytest.raises(InputError, match=message):
        engine.generate("x", 5, sampling=SamplingParams(structured=structured))


def test_the_schema_true_takes_any_document(engine):
    grammar = Grammar(text, VOCABULARY, [EOS], checked_structured("structured", {"json": True}))
    tokens = text.encode_part('{"a": [1, null]}')
    assert grammar._start.deep_copy().try_consume_tokens(tokens) == len(tokens)


def test_a_keyword_may_be_ignored_if_asked_for(engine):
    schema = {"type": "object", "properties": {}, "additionalProperties": False, "unevaluatedProperties": False}
    text = engine.generate("x", 40, sampling={"structured": {"json": schema, "lenient": True}}).text
    assert json.loads(text) == {}


@pytest.mark.parametrize("ban", [{"suppress_tokens": [5]}, {"bad_words": ["b"]}, {"bad_words_ids": [[5, 6]]}])
def test_bans_beside_a_grammar_are_refused(ban, engine):
    with pytest.raises(InputError, match=f"{next(iter(ban))}: expected none beside structured"):
        engine.generate("x", 5, sampling=SamplingParams(structured=MANY, **ban))


def test_masks_of_the_callers_beside_a_grammar_are_refused(engine):
    with pytest.raises(InputError, match="structured: expected none beside allowed_tokens"):
        engine.generate("x", 5, sampling=SamplingParams(structured=MANY), allowed_tokens=lambda output, tree: None)


def test_a_missing_library_is_named(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingPackageError, match=r"llguidance.*specstep\[grammar\]"):
        engine.generate("x", 5, sampling=SamplingParams(structured=MANY))


def test_blanks_are_bounded(engine):
    """Some models write them without end."""
    newline = tiny_tokenizer()("\n")["input_ids"][0]
    sampling = SamplingParams(structured={"json": {"type": "array"}}, logit_bias={newline: 100.0})
    assert 0 < engine.generate("x", 60, sampling=sampling).text.count("\n") < 60
    assert "\n" * 17 not in engine.generate("x", 60, sampling=sampling).text


text = EngineTokenizer(tiny_tokenizer().backend_tokenizer, None, {})


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_masks_of_a_tree_are_those_of_each_path_alone(data):
    structured = data.draw(st.sampled_from(GRAMMARS))
    grammar = Grammar(text, VOCABULARY, [EOS], checked_structured("structured", structured))
    output = []
    for _ in range(data.draw(st.integers(0, 6))):
        allowed = [token for token in allowed_after(grammar._start.deep_copy(), output) if token != EOS]
        if not allowed:
            break
        output.append(data.draw(st.sampled_from(allowed)))
    tokens, parents, paths = [output[-1] if output else 5], [-1], {0: output}
    for node in range(1, data.draw(st.integers(1, 8))):
        parent = data.draw(st.integers(-1, node - 1))
        likely = allowed_after(grammar._start.deep_copy(), paths[parent]) if parent in paths else []
        tokens.append(data.draw(st.sampled_from([*likely, 5, EOS]) if likely else st.integers(0, VOCABULARY - 1)))
        parents.append(parent)
        if parent in paths and tokens[-1] in likely and tokens[-1] != EOS:
            paths[node] = paths[parent] + [tokens[-1]]
    bits = grammar.masks([EOS])(output, DraftedTree(tokens, parents))
    for node, path in paths.items():
        mask = np.flatnonzero(np.unpackbits(bits[node].view(np.uint8), bitorder="little"))
        assert mask.tolist() == sorted(allowed_after(grammar._start.deep_copy(), path))
