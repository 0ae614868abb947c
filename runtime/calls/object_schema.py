"""What a JSON schema says of an object's properties, its definitions and alternatives put together."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

ALTERNATIVES = ("anyOf", "oneOf")
TOLD = ("title", "description", "default", "examples")  # what a schema says to people alone
Schema = Mapping[str, Any]


def whole_object(schema: Schema) -> dict[str, Any]:
    """Of each property what any of the parts says, and as required what all alternatives require; more is allowed than
    by some of them. A part that has the parts of which it is one adds nothing."""
    done: dict[int, dict[str, Any]] = {}

    def whole(part: Any) -> dict[str, Any]:
        found = defined(part, schema)
        if id(found) not in done:
            done[id(found)] = {}
            made = _joined([found, *map(whole, _parts(found, "allOf"))], any)
            for name in ALTERNATIVES:
                if choices := [whole(choice) for choice in _parts(found, name)]:
                    made = _joined([made, _joined(choices, all)], any)
            done[id(found)] = made
        return done[id(found)]

    return whole(schema)


def defined(schema: Any, root: Schema) -> Schema:
    """A schema of an object, or the one of the root's definitions that it refers to."""
    found, seen = schema if isinstance(schema, Mapping) else {}, set[str]()
    while isinstance(name := found.get("$ref"), str) and name not in seen and name.partition("/")[0] == "#":
        seen.add(name)
        place: Any = root
        for part in filter(None, name[1:].split("/")):
            place = place.get(part) if isinstance(place, Mapping) else None
        if not isinstance(place, Mapping):
            break
        found = place
    return found


def _parts(schema: Schema, name: str) -> Sequence[Any]:
    parts = schema.get(name)
    return parts if isinstance(parts, list) else []


def _joined(schemas: Sequence[Schema], needed: Callable[[Iterable[bool]], bool]) -> dict[str, Any]:
    """The properties of several schemas. needed: of which of them what one requires is required."""
    properties: dict[str, list[Any]] = {}
    required: dict[str, None] = {}
    for schema in schemas:
        required |= dict.fromkeys(schema.get("required") or ())
        for name, value in (schema.get("properties") or {}).items():
            properties.setdefault(name, []).append(value)
    whole = dict(schemas[0])
    whole["required"] = [
        name for name in required if needed(name in (schema.get("required") or ()) for schema in schemas)
    ]
    if any("properties" in schema for schema in schemas):
        whole["properties"] = {name: _either(values) for name, values in properties.items()}
    others = [schema["additionalProperties"] for schema in schemas if "additionalProperties" in schema]
    if others:
        whole["additionalProperties"] = next((other for other in others if other is not False), False)
    return whole


def _either(schemas: Sequence[Any]) -> Any:
    """What any of several schemas of a property says: the choices of all where each has some."""
    plain = []
    for schema in map(_silent, schemas):
        plain += [] if schema in plain else [schema]
    if len(plain) == 1:
        return schemas[0]
    if all(isinstance(schema, Mapping) and schema.keys() & {"enum", "const"} for schema in plain):
        choices = [choice for schema in plain for choice in schema.get("enum") or [schema["const"]]]
        return {"enum": [choice for place, choice in enumerate(choices) if choice not in choices[:place]]}
    return {"anyOf": list(schemas)}


def _silent(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    return {name: value for name, value in schema.items() if name not in TOLD}
