"""Which tools a call brings, and which of them the model may or must call."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...runtime.calls.object_schema import ALTERNATIVES
from ...runtime.calls.tool import Tool, Tools
from ..api_error import ApiError
from .custom import grammar_of_format, input_schema

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
WAYS = ("allOf", *ALTERNATIVES)  # in which an object's schema has several parts
MODES = ("none", "auto", "required")
TOOL_KINDS = ("function", "custom")
MOST_TOOLS = 256


def tools_of(tools: Sequence[Mapping[str, Any]] | None, choice: Any, parallel: bool | None) -> Tools | None:
    """What the model may call: `tools`, `tool_choice` and `parallel_tool_calls` of a call, None for nothing. Raises
    ApiError, which names the field."""
    wanted = _wanted(choice)
    if not tools:
        if wanted == "auto" or wanted == "none":
            return None
        raise _wrong("tool_choice", "tools beside it", choice)
    if wanted == "none":
        return None
    if len(tools) > MOST_TOOLS:
        raise _wrong("tools", f"at most {MOST_TOOLS}", len(tools))
    known = {tool.name: tool for tool in (_tool(f"tools[{index}]", each) for index, each in enumerate(tools))}
    if len(known) < len(tools):
        raise _wrong("tools", "names that differ", [tool[tool.get("type", "function")]["name"] for tool in tools])
    mode, names = (wanted, list(known)) if isinstance(wanted, str) else wanted
    missing = [name for name in names if name not in known]
    if missing or not names:
        raise _wrong("tool_choice", f"names among {', '.join(known)}", missing[0] if missing else "none")
    named = mode == "named"
    return Tools([known[name] for name in names], parallel is not False and not named, mode != "auto", named)


def _wanted(choice: Any) -> str | tuple[str, list[str]]:
    """A mode for all tools, or a mode and the names of some. Raises ApiError."""
    if choice is None:
        return "auto"
    if choice in MODES:
        return str(choice)
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind in TOOL_KINDS:
        return "named", [_name(choice.get(kind, choice), "tool_choice")]
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        if isinstance(allowed, Mapping) and allowed.get("mode") in MODES[1:] and isinstance(allowed.get("tools"), list):
            each_allowed = map(_mapping, allowed["tools"])
            names = [_name(each.get(str(each.get("type", "function")), each), "tool_choice") for each in each_allowed]
            return allowed["mode"], list(dict.fromkeys(names))
        raise _wrong("tool_choice", 'allowed_tools with {"mode": "auto" or "required", "tools": [..]}', choice)
    raise _wrong("tool_choice", f"{', '.join(MODES)}, a named function or custom tool, or allowed_tools", choice)


def _tool(place: str, tool: Mapping[str, Any]) -> Tool:
    if tool.get("type") == "custom":
        return _custom(f"{place}.custom", tool.get("custom"))
    if tool.get("type", "function") != "function":
        raise _wrong(f"{place}.type", "function or custom, the kinds that are supported", tool.get("type"))
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _wrong(f"{place}.function", "an object with name and parameters", function)
    name = _name(function, f"{place}.function")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise _wrong(f"{place}.function.parameters", "the JSON schema of an object", parameters)
    _check_parameters(f"{place}.function.parameters", parameters)
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise _wrong(f"{place}.function.strict", "true or false", strict)
    # A function gets the arguments that it declares: what a schema leaves open is not for the model to make up.
    parts = [part for way in WAYS for part in parameters.get(way) or ()]
    more = any(isinstance(part, Mapping) and part.keys() & {"properties", "$ref", *WAYS} for part in parts)
    closed = {} if more or "properties" not in parameters else {"additionalProperties": False}
    return Tool(name, {"type": "object", **closed, **parameters}, bool(strict))


def _check_parameters(place: str, parameters: Mapping[str, Any]) -> None:
    """What the forms of calls read of a schema has the kinds that JSON Schema says. Raises ApiError."""
    for way in WAYS:
        parts = parameters.get(way) or []
        if not isinstance(parts, list) or not all(isinstance(part, Mapping | bool) for part in parts):
            raise _wrong(f"{place}.{way}", "a list of JSON schemas", parts)
        for number, part in enumerate(parts):
            if isinstance(part, Mapping):
                _check_parameters(f"{place}.{way}[{number}]", part)
    for way in ("$defs", "definitions"):
        definitions = parameters.get(way) or {}
        if not isinstance(definitions, Mapping):
            raise _wrong(f"{place}.{way}", "an object of JSON schemas", definitions)
        for name, schema in definitions.items():
            if isinstance(schema, Mapping):
                _check_parameters(f"{place}.{way}.{name}", schema)
    if not isinstance(parameters.get("properties") or {}, Mapping):
        raise _wrong(f"{place}.properties", "an object", parameters["properties"])
    required = parameters.get("required") or []
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _wrong(f"{place}.required", "a list of names", required)
    for name, schema in (parameters.get("properties") or {}).items():
        if not isinstance(schema, Mapping | bool):
            raise _wrong(f"{place}.properties.{name}", "a JSON schema", schema)
        if isinstance(schema, Mapping) and not isinstance(schema.get("enum", []), list):
            raise _wrong(f"{place}.properties.{name}.enum", "a list of values", schema["enum"])


def _custom(place: str, custom: Any) -> Tool:
    if not isinstance(custom, Mapping):
        raise _wrong(place, "an object with name and perhaps format", custom)
    name = _name(custom, place)
    try:
        grammar = grammar_of_format(custom.get("format"))
    except ValueError as error:
        raise _wrong(f"{place}.format", str(error), custom["format"]) from None
    return Tool(name, input_schema(grammar), True, True, grammar)


def _name(function: Any, place: str) -> str:
    name = _mapping(function).get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _wrong(f"{place}.name", "1 to 64 letters, digits, _, . or -", name)
    return name


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _wrong(place: str, expected: str, got: Any) -> ApiError:
    return ApiError(400, f"{place}: expected {expected}, got {got!r:.60}", param=place)
