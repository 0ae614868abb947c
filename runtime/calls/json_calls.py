"""Calls whose arguments are a JSON object: Hermes, Qwen, Llama 3, Mistral, DeepSeek and more."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..asked.lark import literal, schema_term
from ..text.tokenizer import EngineTokenizer
from .tool import Tool
from .written import WrittenCall, json_end

EXAMPLE_ID = "call00001"  # of the call that a template is rendered with


@dataclass(frozen=True)
class JsonCalls:
    """`begin`, calls with `between` among them, `end`; a call is `before`, the name, `middle`, arguments, `after`.
    Behind the name may come `marks_id` and an id of nine letters and digits."""

    opening: str  # what the first call begins with, and nothing else does
    before: str  # text ahead of a function's name
    middle: str  # between name and arguments
    after: str  # behind the arguments
    begin: str = ""  # ahead of the first call
    between: str = ""  # between two calls
    end: str = ""  # behind the last
    leads: str = ""  # see `ToolFormat`
    exact: bool = False  # its blanks are part of its marks
    holds: Sequence[str] = ("regex",)  # by the schema of a text in JSON
    alone: bool = False  # one call is all that the model was taught
    gap: bool = False  # a blank may follow the opening
    marks_id: str = ""  # ahead of a call's id

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """See `ToolFormat`."""
        given = json.dumps(arguments, ensure_ascii=False)
        identified = f"{self.marks_id}{EXAMPLE_ID}" if self.marks_id else ""
        return f"{self.begin}{self.before}{name}{identified}{self.middle}{given}{self.after}{self.end}"

    def rules(self, tools: Sequence[Tool], many: bool, tokenizer: EngineTokenizer) -> list[str]:
        """See `ToolFormat`."""

        def rule(name: str, *terms: str) -> str:
            return f"{name}: {' '.join(filter(None, terms))}"

        def text(written: str) -> str:
            return literal(written, tokenizer)

        gap, after = '" "?' if self.gap else "", text(self.after)
        first = text((self.begin + self.before).removeprefix(self.opening))
        more = " ".join(filter(None, [text(self.between + self.before), "call", after]))
        again = f"({more})*" if many and not self.alone else ""
        rules = [
            rule("calls", gap, first, "call", after, again, text(self.end)),
            rule("call", " | ".join(f"call_{index}" for index in range(len(tools)))),
        ]
        rules += [rule("id", "/[a-zA-Z0-9]{9}/")] if self.marks_id else []
        for index, tool in enumerate(tools):
            head = [text(tool.name + self.marks_id), "id" if self.marks_id else "", text(self.middle)]
            rules.append(rule(f"call_{index}", *head, f"arguments_{index}"))
            rules.append(rule(f"arguments_{index}", schema_term(tool.parameters, lenient=not tool.strict)))
        return rules

    def read(self, text: str, tools: Sequence[Tool]) -> list[WrittenCall]:
        """See `ToolFormat`."""
        calls, at = [], 0
        identified = f"(?:{re.escape(self.marks_id)}[a-zA-Z0-9]*)" if self.marks_id else ""
        head = re.compile(re.escape(self.before) + r"([\w.-]+)" + identified + re.escape(self.middle))
        while (found := head.search(text, at)) is not None:
            end = json_end(text, found.end())
            calls.append(WrittenCall(found[1], text[found.end() : end]))
            if end is None:
                break
            at = end
        return calls
