"""What a model wrote of its calls so far, and how their forms are alike."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..text.tokenizer import EngineTokenizer
from .tool import Tool


@dataclass(frozen=True)
class WrittenCall:
    """A call as far as it is written: the function's name, and the text of a JSON object, of its arguments. custom:
    whether it is a custom tool's, and the text is what that takes; ended: whether that text is all there."""

    name: str
    arguments: str
    custom: bool = False
    ended: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether nothing of it is missing."""
        return self.ended if self.custom else json_end(self.arguments, 0) is not None


@dataclass(frozen=True)
class ReadAnswer:
    """What is certain of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: Sequence[WrittenCall] = ()


class ToolFormat(Protocol):
    """The form in which a model writes calls."""

    @property
    def opening(self) -> str:
        """What the first call begins with, and nothing else does."""

    @property
    def leads(self) -> str:
        """Where that means a call only at the beginning of an answer, how text may not begin: a regular expression, in
        which ~ is for blanks. Else empty."""

    @property
    def exact(self) -> bool:
        """Whether its blanks are part of its marks."""

    @property
    def holds(self) -> Collection[str]:
        """Syntaxes of the grammars that it can hold the text of a custom tool to."""

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call, from the opening to the end."""

    def rules(self, tools: Sequence[Tool], many: bool, tokenizer: EngineTokenizer) -> list[str]:
        """Rules of a Lark grammar; `calls` is what follows the opening. many: whether there may be several."""

    def read(self, text: str, tools: Sequence[Tool]) -> list[WrittenCall]:
        """The calls in what a model wrote so far, from the opening on. Of a longer text it gives the same, or more of
        the last one, or more of them: arguments as far as they are certain."""


def shows(form: ToolFormat, rendered: str, name: str, second: str) -> bool:
    """Whether a text has a call of such a function, with an argument of the same name and a second one."""
    written = form.write(name, {name: "", second: ""})
    begins = written[: written.rindex(second) + len(second)]
    return begins in rendered if form.exact else _dense(begins) in _dense(rendered)


def json_end(text: str, start: int) -> int | None:
    """Where the JSON object ends that starts there, None where it goes on."""
    depth, quoted, at = 0, False, start
    for mark in _MARKS.finditer(text, start):
        at, char = mark.end(), mark[0]
        if quoted:
            quoted = char != '"'
        elif char == '"':
            quoted = True
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
            if depth == 0:
                return at
    return None


_MARKS = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


def _dense(text: str) -> str:
    return "".join(text.split())
