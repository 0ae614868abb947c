"""What a model may call."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SYNTAXES = ("lark", "regex")
ALTERNATIVES = ("anyOf", "oneOf")


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
        """The schema of the object, its definitions and alternatives put together: of each argument what any of them
        says, and as required what all of them require."""
        return self._whole(self.parameters, ())

    @property
    def alternatives(self) -> list[str]:
        """The keywords by which the object's schema has several, which `arguments` puts together."""
        found = self._defined(self.parameters)
        return [name for name in (*ALTERNATIVES, "allOf") if found.get(name)]

    def _whole(self, schema: Any, seen: tuple[Any, ...]) -> dict[str, Any]:
        found = dict(self._defined(schema))
        if any(found is other or found == other for other in seen):
            return {}
        parts = [self._whole(part, (*seen, found)) for part in found.get("allOf") or ()]
        found = _joined([found, *parts], any)
        for name in ALTERNATIVES:
            if choices := [self._whole(part, (*seen, found)) for part in found.get(name) or ()]:
                found = _joined([found, _joined(choices, all)], any)
        return found

    def _defined(self, schema: Any) -> Mapping[str, Any]:
        """A schema, or the one of the definitions that it refers to."""
        found, seen = schema if isinstance(schema, Mapping) else {}, set[str]()
        while isinstance(name := found.get("$ref"), str) and name not in seen and name.startswith("#/"):
            seen.add(name)
            place: Any = self.parameters
            for part in name[2:].split("/"):
                place = place.get(part) if isinstance(place, Mapping) else None
            if not isinstance(place, Mapping):
                break
            found = place
        return found


def _joined(schemas: Sequence[Mapping[str, Any]], needed: Callable[[Iterable[bool]], bool]) -> dict[str, Any]:
    """The properties of several schemas of objects. needed: of which of them what one requires is required."""
    properties: dict[str, list[Any]] = {}
    for schema in schemas:
        for name, value in (schema.get("properties") or {}).items():
            if value not in properties.setdefault(name, []):
                properties[name].append(value)
    required = [name for name in properties if needed(name in (schema.get("required") or ()) for schema in schemas)]
    whole: dict[str, Any] = {**schemas[0], "required": required}
    if any("properties" in schema for schema in schemas):
        whole["properties"] = {
            name: values[0] if len(values) == 1 else {"anyOf": values} for name, values in properties.items()
        }
    others = [schema["additionalProperties"] for schema in schemas if "additionalProperties" in schema]
    if others:
        whole["additionalProperties"] = next((other for other in others if other is not False), False)
    return whole


@dataclass(frozen=True)
class Tools:
    """The tools of one answer. many: whether the model may make several calls; required: whether it must make one;
    named: whether the client said which."""

    tools: Sequence[Tool]
    many: bool
    required: bool
    named: bool
