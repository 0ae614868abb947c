"""What a model may call."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .object_schema import ALTERNATIVES, defined, whole_object

SYNTAXES = ("lark", "regex")


@dataclass(frozen=True)
class InputGrammar:
    """What the text of a custom tool must be. definition: Lark, or a regular expression for all of it."""

    syntax: str
    definition: str

    @property
    def term(self) -> str:
        """The same as a term of a Lark grammar."""
        if self.syntax == "lark":
            return f"%lark {{\n{self.definition}\n}}"
        plain = re.sub(r"\\.|/|\n", lambda found: _SLASHES.get(found[0], found[0]), self.definition, flags=re.DOTALL)
        return f"/(?:{plain})/"


_SLASHES = {"/": r"\/", "\n": r"\n"}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. parameters: the JSON schema of its arguments, an object's. strict: whether a
    keyword of it that cannot be kept is an error. custom: whether it stands for a custom tool, whose text is its one
    argument; grammar: what that must be, None for anything."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool
    custom: bool = False
    grammar: InputGrammar | None = None

    @property
    def properties(self) -> dict[str, Any]:
        """Schemas of its arguments by name."""
        return dict(self.arguments.get("properties") or {})

    @property
    def extra(self) -> Any:
        """The schema of arguments that have no other one, None where there are none: those that a schema speaks of, and
        any where it names none."""
        free = "properties" not in self.arguments
        schema = self.arguments.get("additionalProperties", True if free else None)
        return None if schema is None or schema is False else {} if schema is True else schema

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The schema of the object, see `whole_object`."""
        return whole_object(self.parameters)

    @property
    def alternatives(self) -> list[str]:
        """The keywords by which the object's schema has several, which `arguments` puts together."""
        found = defined(self.parameters, self.parameters)
        return [name for name in (*ALTERNATIVES, "allOf") if found.get(name)]


@dataclass(frozen=True)
class Tools:
    """The tools of one answer. many: whether the model may make several calls; required: whether it must make one;
    named: whether the client said which."""

    tools: Sequence[Tool]
    many: bool
    required: bool
    named: bool
