"""Custom tools: they take a text, which the model gives as the one argument of a function."""

import json
import re
from collections.abc import Mapping
from typing import Any

from ...runtime.calls.tool import SYNTAXES, InputGrammar

Json = dict[str, Any]
INPUT = "input"  # the argument
ESCAPED = r'\\u[0-9a-fA-F]{4}|\\["\\/bfnrt]'


def input_schema(grammar: InputGrammar | None) -> Json:
    """The schema of the function's arguments. It says what the text must be, and holds it where that is a regex."""
    text: Json = {"type": "string"}
    if grammar is not None:
        text["description"] = f"Text of this {grammar.syntax} grammar:\n{grammar.definition}"
        if grammar.syntax == "regex":
            text["pattern"] = f"^(?:{grammar.definition})$"
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


def grammar_of_format(form: Any) -> InputGrammar | None:
    """That of a tool's `format`, None for any text. Raises ValueError for another form, which says what is expected."""
    kind = form.get("type") if isinstance(form, Mapping) else None
    if form is None or kind == "text":
        return None
    grammar = form.get("grammar") if kind == "grammar" else None
    if isinstance(grammar, Mapping) and grammar.get("syntax") in SYNTAXES:
        definition = grammar.get("definition")
        if isinstance(definition, str) and definition:
            return InputGrammar(grammar["syntax"], definition)
    raise ValueError('{"type": "text"}, or grammar with {"syntax": "lark" or "regex", "definition": TEXT}')


def as_function(tool: Json) -> Json:
    """A tool as the model is told of it: a custom one is a function."""
    custom = tool.get("custom")
    if tool.get("type") != "custom" or not isinstance(custom, Mapping):
        return tool
    try:
        parameters = input_schema(grammar_of_format(custom.get("format")))
    except ValueError:  # of a tool that nobody may call
        parameters = input_schema(None)
    told = {name: custom[name] for name in ("name", "description") if custom.get(name) is not None}
    return {"type": "function", "function": {**told, "parameters": parameters}}


def as_function_call(call: Json) -> Json:
    """A call of an earlier answer as the model is shown it."""
    custom = call.get("custom")
    if call.get("type") != "custom" or not isinstance(custom, Mapping):
        return call
    given = {"name": custom.get("name"), "arguments": {INPUT: custom.get("input")}}
    return {**{name: call[name] for name in call if name != "custom"}, "type": "function", "function": given}


def input_text(arguments: str) -> str:
    """The text in the arguments of a function, as far as they are written and certain."""
    begun = _BEGIN.match(arguments)
    if begun is None:
        return ""
    written = []
    at = begun.end()
    while (found := _CHARACTERS.match(arguments, at)) is not None:
        written.append(found[0])
        at = found.end()
    if written and _FIRST_HALF.fullmatch(written[-1]):
        written.pop()
    text = str(json.loads(f'"{"".join(written)}"', strict=False))
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_CHARACTERS = re.compile(rf'{ESCAPED}|[^"\\]+')
_FIRST_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")  # of a character beyond the first plane
