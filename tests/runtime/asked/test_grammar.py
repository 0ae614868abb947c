"""Structured output: what is refused, and masks of trees."""

import json
import sys

import numpy as np
import pytest
import specstep
from grammars import EOS, GRAMMARS, VOCABULARY, allowed_after
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny_tokenizer
from specstep import DraftedTree, InputError, MissingPackageError, SamplingParams
from specstep.runtime.asked.grammar import Grammar
from specstep.runtime.asked.grammar_masks import GrammarMasks
from specstep.runtime.asked.sampling_params import ELSEWHERE
from specstep.runtime.asked.structured import checked_structured
from specstep.runtime.text.tokenizer import EngineTokenizer
from tokenizers import AddedToken


def test_the_names_of_other_systems_lead_here():
    assert {name for name, here in ELSEWHERE.items() if here == "structured"} >= {"structured_outputs"}


@pytest.fixture(scope="module")
def engine(engine_folder):
    with specstep.load(engine_folder) as opened:
        yield opened


MANY = {"regex": "a{3}b*"}


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
        ({}, "structured: expected one of json, .*, and perhaps lenient, whole, disable_any_whitespace, got none"),
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


def test_a_missing_library_is_named(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingPackageError, match=r"llguidance.*specstep\[grammar\]"):
        engine.generate("x", 5, sampling=SamplingParams(structured=MANY))


def test_blanks_are_bounded(engine):
    """Some models write them without end (vLLM 38696, 52011)."""
    newline = tiny_tokenizer()("\n")["input_ids"][0]
    sampling = SamplingParams(structured={"json": {"type": "array"}}, logit_bias={newline: 100.0})
    assert 0 < engine.generate("x", 60, sampling=sampling).text.count("\n") < 60
    assert "\n" * 17 not in engine.generate("x", 60, sampling=sampling).text


@pytest.mark.parametrize("form", [{"json_object": True}, {"json": {"type": "object", "required": ["a", "b"]}}])
def test_blanks_may_be_fixed(engine, form):
    """One behind each comma and colon: wherever the model would write another, there is no choice."""
    blanks = {tiny_tokenizer()(blank)["input_ids"][0]: 100.0 for blank in "\n\t"}
    fixed = form | {"disable_any_whitespace": True}
    written = []
    for structured in (form, fixed):
        sampling = SamplingParams(structured=structured, logit_bias=blanks, temperature=1.0, seed=4)
        written.append(engine.generate("x", 60, sampling=sampling).text)
    assert "\n" in written[0] and "\t" in written[0] and not {*"\n\t"} & {*written[1]}
    grammar = Grammar(text, VOCABULARY, [EOS], checked_structured("structured", fixed))
    for document, takes in (
        ('{"a": [1, null], "b": {}}', True),
        ('{"a":1, "b": 2}', False),
        ('{"a": 1,"b": 2}', False),
    ):
        tokens = text.encode_part(document)
        assert (grammar._start.deep_copy().try_consume_tokens(tokens) == len(tokens)) == takes


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


def test_masks_are_right_where_few_are_kept(monkeypatch):
    """Each one is made anew, with many in one tree."""
    monkeypatch.setattr("specstep.runtime.asked.grammar_masks.MOST_MADE", 1)
    grammar = Grammar(text, VOCABULARY, [EOS], checked_structured("structured", {"choice": ["abc", "acb"]}))
    a, b, c = text.encode_part("abc")
    masks = grammar.masks([EOS])
    for _ in range(2):
        bits = masks([], DraftedTree([5, a, b, c, c], [-1, 0, 1, 1, 2]))
        found = [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() for row in bits]
        assert found == [[a], sorted([b, c]), [c], [b], [EOS]] and len(masks._made) == 1


@pytest.mark.parametrize("pieces", [('{"', ' "'), (' "', '{"')])
@pytest.mark.parametrize("document", ["[", "[1,", '[{"a": 1},'])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_branch_knows_nothing_of_another(document, pieces, steps):
    """A key may go on with `":`, a string may not. llguidance mistakes them where it went back between them: in a tree,
    or from a draft to what the target says instead."""
    tokenizer = tiny_tokenizer().backend_tokenizer
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in ('":', '{"', ' "')])
    wide = EngineTokenizer(tokenizer, None, {})
    array = checked_structured("structured", {"json": {"type": "array"}})
    grammar = Grammar(wide, tokenizer.get_vocab_size(), [EOS], array)
    output, (colon,) = wide.encode_part(document), wide.encode_part('":')
    first, second = (wide.encode_part(piece)[0] for piece in pieces)
    masks = grammar.masks([EOS])
    if steps == 1:
        _, *bits = masks(output, DraftedTree([output[-1], first, second], [-1, 0, 0]))
    else:
        _, after = masks(output, DraftedTree([output[-1], first], [-1, 0]))
        bits = [after, *masks([*output, second], DraftedTree([second], [-1]))]
    allowed = [bool(mask.view(np.uint32)[colon // 32] >> colon % 32 & 1) for mask in bits]
    assert allowed == [piece == '{"' for piece in pieces]
