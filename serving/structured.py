"""Structured output as clients ask for it: OpenAI's `response_format`, vLLM's `structured_outputs`, llama.cpp's
`grammar` and `json_schema`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..errors import InputError
from ..runtime.asked.structured import checked_structured
from .fields import CommonFields


def structured_of(body: CommonFields) -> dict[str, Any] | None:
    """What the output must be, as `SamplingParams.structured` takes it. Raises InputError for more than one, and for
    what is none, by the field's name."""
    asked = {name: make(getattr(body, name)) for name, make in _FORMS.items() if getattr(body, name) is not None}
    given = {name: form for name, form in asked.items() if form is not None}
    if len(given) > 1:
        raise InputError(f"{list(given)[1]}: expected one of {', '.join(_FORMS)}, got {' and '.join(given)}")
    return next((checked_structured(name, form) for name, form in given.items()), None)


@contextmanager
def names_as_sent(body: CommonFields) -> Iterator[None]:
    """Within it, errors of the engine about structured output name the field that the client sent."""
    try:
        yield
    except InputError as error:
        sent, text = [name for name in ("tools", *_FORMS) if getattr(body, name, None) not in (None, [])], str(error)
        if sent and text.startswith("structured:"):
            raise InputError(text.replace("structured", sent[0], 1)) from None
        raise


def _response_format(value: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")  # llama.cpp's
        return {"json_object": True} if schema is None else {"json": schema}
    if kind != "json_schema":
        raise InputError(f"response_format: type: expected text, json_object or json_schema, got {kind!r:.60}")
    named = value.get("json_schema")
    if not isinstance(named, Mapping) or not isinstance(named.get("schema"), Mapping):
        raise InputError('response_format: json_schema: expected {"name": NAME, "schema": SCHEMA}, got another form')
    return {"json": named["schema"]}  # kept with `strict` and without


_FORMS: dict[str, Callable[[Any], dict[str, Any] | None]] = {
    "response_format": _response_format,
    "structured_outputs": dict,
    "grammar": lambda value: {"grammar": value},
    "json_schema": lambda value: {"json": value},
}
