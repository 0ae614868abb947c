"""Calls in the form of a list of Python's calls: Llama 4, LFM2."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..asked.lark import any_but, literal
from ..text.tokenizer import EngineTokenizer
from .tool import Tool
from .written import WrittenCall

MORE_CALLS = '(", " call)*'
VALUES = r"""value: TEXT_VALUE | NUMBER | "True" | "False" | "None" | list | mapping
list: "[" (value (", " value)*)? "]"
mapping: "{" (pair (", " pair)*)? "}"
pair: TEXT_VALUE ": " value
TEXT_VALUE: /"([^"\\\x00-\x1f]|\\["\\nrt])*"/
INTEGER: /-?(0|[1-9][0-9]{0,17})/
NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?(e[+-]?[0-9]{1,2})?/"""
TYPE_RULES = {
    "string": "TEXT_VALUE", "integer": "INTEGER", "number": "NUMBER", "boolean": '("True" | "False")',
    "null": '"None"', "array": "list", "object": "mapping",
}  # fmt: skip


@dataclass(frozen=True)
class PythonCalls:
    """`begin`, calls with commas among them, `end`. Of a schema the kinds of arguments and lists of choices hold."""

    opening: str  # what the first call begins with, and nothing else does
    end: str  # behind the last
    leads: str = ""  # see `ToolFormat`
    exact: bool = False  # its blanks are part of its marks
    holds: Sequence[str] = ()  # syntaxes of grammars that a custom tool's text can be held to

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """See `ToolFormat`."""
        return f"{self.opening}{name}({', '.join(f'{key}={_python(arguments[key])}' for key in arguments)}){self.end}"

    def rules(self, tools: Sequence[Tool], many: bool, tokenizer: EngineTokenizer) -> list[str]:
        """See `ToolFormat`."""
        rules = [
            f"calls: call {MORE_CALLS if many else ''} {literal(self.end, tokenizer)}",
            f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}",
            *VALUES.splitlines(),
        ]
        for index, tool in enumerate(tools):
            rules += _call(f"call_{index}", tool)
        return rules

    def read(self, text: str, tools: Sequence[Tool]) -> list[WrittenCall]:
        """See `ToolFormat`. A call is certain when its end is written."""
        calls: list[WrittenCall] = []
        at = len(self.opening)
        while (found := _NAME.match(text, at)) is not None:
            end = _closing(text, found.end())
            if end is None:
                return [*calls, WrittenCall(found[1], "")]
            calls.append(WrittenCall(found[1], _arguments(text[found.end() : end])))
            at = end + 1
        return calls


_NAME = re.compile(r"(?:, )?([\w.-]+)\(")


def _call(rule: str, tool: Tool) -> list[str]:
    """Rules of a call: required arguments, then the others, each after a comma but for the first."""
    wanted = [name for name in tool.arguments.get("required") or () if name in tool.properties]
    names = [*wanted, *(name for name in tool.properties if name not in wanted)]
    rules, following = [], ""
    for number, name in reversed(list(enumerate(names))):
        value = _value(tool.properties[name])
        rules.append(f"{rule}_{number}: {json.dumps(name + '=')} {value} {following}".rstrip())
        rest = [f"{rule}_{later}" for later in range(number, len(names)) if later == number or name not in wanted]
        following = f'(", " ({" | ".join(rest)}))' + ("" if name in wanted else "?")
    first = [f"{rule}_{number}" for number in range(len(names))][: 1 if wanted else None]
    given = f"({' | '.join(first)}){'' if wanted else '?'}" if first else ""
    if tool.extra is not None:
        rules.append(f'{rule}_extra: {rule.upper()} "=" {_value(tool.extra)}')
        rules.append(f"{rule.upper()}: /[a-zA-Z_][a-zA-Z0-9_]{{0,63}}/{any_but(names)}")
        more = f'(", " {rule}_extra)*'
        alone = f"({rule}_extra {more})?"
        given = f"({' | '.join(first)}) {more}" + ("" if wanted else f" | {alone}") if first else alone
        given = f"({given})"
    return [f'{rule}: {json.dumps(tool.name + "(")} {given} ")"', *rules]


def _value(schema: Any) -> str:
    """A term for an argument's value."""
    schema = schema if isinstance(schema, Mapping) else {}
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if choices:
        return f"({' | '.join(json.dumps(_python(choice)) for choice in choices)})"
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    return f"({' | '.join(TYPE_RULES.get(each, 'value') for each in kinds)})"


def _python(value: Any) -> str:
    """A value as Python writes it, texts in double quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _closing(text: str, start: int) -> int | None:
    """Where the parenthesis is that closes a call, None where it goes on."""
    quoted = False
    for mark in re.compile(r'\\.|["()]', re.DOTALL).finditer(text, start):
        if mark[0] == '"':
            quoted = not quoted
        elif mark[0] == ")" and not quoted:
            return mark.start()
    return None


def _arguments(written: str) -> str:
    """The JSON of a call's arguments; what is no Python stays as the text that it is."""
    try:
        given = {name: ast.literal_eval(value) for name, value in map(_pair, _parts(written))}
        return json.dumps(given, ensure_ascii=False)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return json.dumps({"text": written}, ensure_ascii=False)


def _parts(written: str) -> list[str]:
    """What commas part, but for those inside of quotes and brackets."""
    parts, start, depth, quote = [], 0, 0, ""
    for mark in re.compile(r"\\.|[\"'()\[\]{},]", re.DOTALL).finditer(written):
        if quote or mark[0] in "\"'":
            quote = mark[0] if not quote else "" if mark[0] == quote else quote
        elif mark[0] == "," and not depth:
            parts.append(written[start : mark.start()])
            start = mark.end()
        else:
            depth += (mark[0] in "([{") - (mark[0] in ")]}")
    last = written[start:]
    return [*parts, last] if last.strip() else parts


def _pair(part: str) -> tuple[str, str]:
    """A parameter's name, which need be no name of Python's (`from`, `to-city`), and its value. Raises ValueError."""
    name, equals, value = part.partition("=")
    if not equals:
        raise ValueError(f"expected name=value, got {part:.60}")
    return name.strip(), value.strip()
