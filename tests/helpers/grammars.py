"""Grammars of every kind, what texts keep them, and what a matcher that is asked anew each time allows."""

import json
import re

import numpy as np
import torch
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from models import tiny_tokenizer
from specstep.runtime.asked.structured import checked_structured
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
POINT = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}, "required": ["x", "y"]}
LINKED = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"value": {"enum": [0, 1]}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS = [
    PERSON,
    json.dumps({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}),
    {"enum": [1, "two", None, [3]]},
    {"anyOf": [{"const": "x"}, {"type": "integer", "minimum": 10, "maximum": 12}]},
    {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"n": {}}, "required": ["n"]}}},
    LINKED,
    {"type": "array", "items": POINT, "minItems": 1, "maxItems": 2},
    {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"const": "deep"}}}}},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "boolean"}}, "additionalProperties": False},
    {"type": "array", "prefixItems": [{"const": 1}, {"type": "string", "maxLength": 3}], "items": False},
    {"type": ["string", "null"], "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[a-f0-9]{4}-[a-f0-9]{2}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 40},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"required": ["a"]}]},
    {"type": "object", "properties": {"key with a very long name": {"enum": ["one long value", "one long word"]}}},
    {"const": {"all": ["is", "forced", {"n": 1.5}]}},
]
REGEXES = [
    "[0-9]{4}-[0-9]{2}-[0-9]{2}",
    r"(ab|a)*c?",
    "[é-ü]{1,4}",
    r"(?:yes|no|maybe)(?:, (?:yes|no|maybe))*",
    r"\+?[0-9]{1,3}( [0-9]{2,3}){2}",
    r"the (quick|slow) brown fox",
    r"a?b?c?d?e?f",
]
CHOICES = [
    ["yes", "no", "yes, of course"],
    ['a "quoted" one', "line\nend", "日本"],
    ["a", "aa", "aaa", "aaaaaaaa"],
    ["only this"],
]
TEXTS = [
    'root ::= item ("," item)*\nitem ::= [0-9]+ | "(" root ")"',
    'start: "<" /[a-z]{2,3}/ ">" | "-"',
    'root ::= "x"+',
    'root ::= term (("+" | "-") term)*\nterm ::= [0-9] | "(" root ")"',
    'root ::= "begin " line+ "end"\nline ::= [a-c]{1,3} ";"',
    "start: %json " + json.dumps({"type": "array", "items": {"enum": ["u", "v"]}, "maxItems": 3}),
    'start: word (" " word)~1..3\nword: /[a-z]+/',
    'start: "SELECT " column ("," column)* " FROM t"\ncolumn: "a" | "b" | "count(*)"',
]
GRAMMARS = [
    *({"json": schema} for schema in SCHEMAS),
    {"json_object": True},
    *({"regex": regex} for regex in REGEXES),
    *({"choice": texts} for texts in CHOICES),
    *({"grammar": text} for text in TEXTS),
]


def check(structured, text):
    """Whether a whole text is what was asked for, as far as others than llguidance can say."""
    kind, value = next(iter(structured.items()))
    if kind == "json":
        Draft202012Validator(json.loads(value) if isinstance(value, str) else value).validate(json.loads(text))
    elif kind == "json_object":
        assert isinstance(json.loads(text), dict)
    elif kind == "regex":
        assert re.fullmatch(value, text)
    elif kind == "choice":
        assert text in value


def compiled(structured):
    """llguidance's form, made here once more."""
    from specstep.runtime.asked.grammar import _compiled

    return _compiled(checked_structured("structured", structured))


def plain_matcher(structured):
    """A matcher of a grammar for `tiny_tokenizer`."""
    tokenizer = LLTokenizer(tiny_tokenizer().backend_tokenizer.to_str(), n_vocab=VOCABULARY, eos_token=[EOS])
    return LLMatcher(tokenizer, compiled(structured))


def allowed_after(matcher, tokens):
    """Tokens that may follow, of a matcher that read nothing yet."""
    assert matcher.consume_tokens(list(tokens)) or not tokens
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return np.flatnonzero(bits[:VOCABULARY]).tolist()


class PlainDecoding:
    """The greedy text of transformers, each token masked by a matcher that read all tokens anew."""

    def __init__(self, folder):
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._known = {}

    def __call__(self, prompt, structured, most):
        key = json.dumps([prompt, structured, most])
        if key not in self._known:
            self._known[key] = self._continuation(prompt, plain_matcher(structured), most)
        return self._known[key]

    @torch.no_grad()
    def _continuation(self, prompt, start, most):
        output = []
        while len(output) < most and EOS not in output:
            logits = self._model(torch.tensor([prompt + output])).logits[0, -1]
            allowed = torch.tensor(allowed_after(start.deep_copy(), output))
            output.append(int(allowed[logits[allowed].argmax()]))
        return output
