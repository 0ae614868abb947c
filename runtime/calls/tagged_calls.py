"""Calls whose arguments have a mark around each: Qwen3-Coder, GLM 4.5 and 4.7."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InputError
from ..asked.lark import ANY, any_but, literal, schema_term
from ..text.tokenizer import EngineTokenizer
from .tool import SYNTAXES, Tool
from .written import WrittenCall

OF_TEXTS = ("minLength", "maxLength", "pattern", "format")  # what a schema may say of a text


@dataclass(frozen=True)
class TaggedCalls:
    """A call is `before`, the name, `middle`, arguments, `after`; an argument is `key`, its name, `value`, its text,
    `value_end`. Texts are written as they are, other values as JSON. Arguments come in the order of the schema."""

    opening: str  # what the first call begins with, and nothing else does
    before: str  # text ahead of a function's name
    middle: str  # between name and arguments
    key: str  # ahead of an argument's name
    value: str  # between its name and its text
    value_end: str  # behind its text
    after: str  # behind the arguments
    between: str  # between two calls
    leads: str = ""  # see `ToolFormat`
    exact: bool = True  # its blanks are part of its marks
    holds: Sequence[str] = SYNTAXES  # syntaxes of grammars that a custom tool's text can be held to

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """See `ToolFormat`."""
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        given = "".join(f"{self.key}{key}{self.value}{text}{self.value_end}" for key, text in texts.items())
        return f"{self.before}{name}{self.middle}{given}{self.after}"

    def rules(self, tools: Sequence[Tool], many: bool, tokenizer: EngineTokenizer) -> list[str]:
        """See `ToolFormat`."""
        start, end = self.before.removeprefix(self.opening), literal(self.after, tokenizer)
        first = f"{literal(start, tokenizer)} call" if start else "call"
        again = f"({literal(self.between + self.before, tokenizer)} call {end})*" if many else ""
        rules = [
            f"calls: {first} {end} {again}".rstrip(),
            f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}",
        ]
        for index, tool in enumerate(tools):
            if tool.strict and tool.alternatives:
                raise _unkept(tool, f"{tool.alternatives[0]}: arguments are written one by one")
            wanted, arguments = tool.arguments.get("required") or (), []
            for number, (name, schema) in enumerate(tool.properties.items()):
                rule = f"argument_{index}_{number}"
                arguments.append(rule if name in wanted else f"({rule})?")
                key = literal(self.key + name + self.value, tokenizer)
                rules.append(f"{rule}: {key} {rule}_value")
                rules += self._value(f"{rule}_value", schema, tool, tokenizer)
            if tool.extra is not None:
                arguments.append(f"(extra_{index})*")
                rules += self._extra(f"extra_{index}", tool, tokenizer)
            rules.append(f"call_{index}: {literal(tool.name + self.middle, tokenizer)} {' '.join(arguments)}".rstrip())
        return rules

    def _extra(self, rule: str, tool: Tool, tokenizer: EngineTokenizer) -> list[str]:
        """Rules of an argument of another name than those that the schema has."""
        name = f"{rule.upper()}: /[^<>\\s]{{1,64}}/{any_but(list(tool.properties))}"
        marks = literal(self.key, tokenizer), literal(self.value, tokenizer)
        return [
            f"{rule}: {marks[0]} {rule.upper()} {marks[1]} {rule}_value",
            name,
            *self._value(f"{rule}_value", tool.extra, tool, tokenizer),
        ]

    def _value(self, rule: str, schema: Any, tool: Tool, tokenizer: EngineTokenizer) -> list[str]:
        """Rules of a value and its end. Raises InputError for what a strict tool's schema says of a text."""
        end = literal(self.value_end, tokenizer)
        if tool.grammar is not None:
            return [f"{rule}: {rule}_text {end}", f"{rule}_text: {tool.grammar.term}"]
        texts = _texts(schema)
        if texts:
            return [f"{rule}: ({' | '.join(literal(text, tokenizer) for text in texts)}) {end}"]
        if _is_text(schema):
            lost = [name for name in OF_TEXTS if isinstance(schema, Mapping) and name in schema]
            if lost and tool.strict:
                raise _unkept(tool, f"{lost[0]}: texts are written as they are")
            return [f"{rule}[lazy]: {ANY} {end}"]
        rooted = {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
        return [f"{rule}: {rule}_json {end}", f"{rule}_json: {schema_term(rooted | schema, lenient=not tool.strict)}"]

    def read(self, text: str, tools: Sequence[Tool]) -> list[WrittenCall]:
        """See `ToolFormat`. An argument is certain when its end is written."""
        known = {tool.name: tool for tool in tools}
        behind = "" if self.middle else f"(?={re.escape(self.key)}|{re.escape(self.after)})"  # else a part of a name
        head = re.compile(re.escape(self.before) + r"([\w.-]+)" + re.escape(self.middle) + behind)
        marks = [re.escape(mark) for mark in (self.key, self.value, self.value_end)]
        argument = re.compile("{}(.*?){}(.*?){}".format(*marks), re.DOTALL)
        calls, at = [], 0
        while (found := head.search(text, at)) is not None:
            at, arguments = found.end(), []
            while (given := argument.match(text, at)) is not None:
                at = given.end()
                arguments.append(f"{json.dumps(given[1])}: {_json(given[2], known.get(found[1]), given[1])}")
            ended = text.startswith(self.after, at)
            calls.append(WrittenCall(found[1], "{" + ", ".join(arguments) + ("}" if ended else "")))
            if not ended:
                break
        return calls


def _unkept(tool: Tool, why: str) -> InputError:
    return InputError(
        f"structured: {tool.name}: expected a schema that this model's form of calls can keep, got {why}; leave it "
        "out, or strict"
    )


def _json(value: str, tool: Tool | None, name: str) -> str:
    """The JSON of an argument as it is written."""
    schema = {} if tool is None else tool.properties.get(name, tool.extra or {})
    return json.dumps(value, ensure_ascii=False) if _texts(schema) or _is_text(schema) else value.strip()


def _texts(schema: Any) -> list[str]:
    """The texts that a value may be, where they are all that it may be."""
    choices = schema.get("enum", [schema["const"]] if "const" in schema else []) if isinstance(schema, Mapping) else []
    return choices if choices and all(isinstance(each, str) and each for each in choices) else []


def _is_text(schema: Any) -> bool:
    """Whether a value is a text as it is: of a schema that says no other kind."""
    if not isinstance(schema, Mapping):
        return True
    kind, chosen = schema.get("type"), schema.keys() & {"enum", "const"}
    return not chosen and (
        kind == "string" or (kind is None and not schema.keys() & {"anyOf", "oneOf", "allOf", "$ref"})
    )
