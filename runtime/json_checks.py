"""Checks of data that came as JSON: each takes a field's name and its value, and raises ValueError with what was
expected and what was found."""

from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[str, Any], None]
MOST = 2**40  # of any size: products of a few stay far from what no integer of 64 bits holds
MOST_ITEMS = 2**16


def refusal(name: str, expected: Any, got: Any) -> ValueError:
    """The error of a field."""
    return ValueError(f"{name}: expected {expected}, got {got!r:.60}")


def anything(name: str, value: Any) -> None:
    """Takes every value."""


def text(name: str, value: Any) -> None:
    """Takes a text."""
    if not isinstance(value, str):
        raise refusal(name, "a text", value)


def line(name: str, value: Any) -> None:
    """Takes a text of one line without control characters, which an error may quote as it is."""
    if not isinstance(value, str) or not value.isprintable():
        raise refusal(name, "one line of text", value)


def number(name: str, value: Any) -> None:
    """Takes a number that is not a truth value."""
    if type(value) not in (int, float):
        raise refusal(name, "a number", value)


def truth(name: str, value: Any) -> None:
    """Takes a truth value."""
    if type(value) is not bool:
        raise refusal(name, "true or false", value)


def integer(low: int, high: int = MOST) -> Check:
    """Takes an integer from low to high."""

    def check(name: str, value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            raise refusal(name, f"an integer from {low} to {high}", value)

    return check


def one_of(*allowed: str) -> Check:
    """Takes one of some texts."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, str) or value not in allowed:
            raise refusal(name, f"one of {', '.join(allowed)}", value)

    return check


def equal_to(expected: Any) -> Check:
    """Takes one value."""

    def check(name: str, value: Any) -> None:
        if type(value) is not type(expected) or value != expected:
            raise refusal(name, expected, value)

    return check


def optional(check: Check) -> Check:
    """Takes null, and what `check` takes."""
    return lambda name, value: None if value is None else check(name, value)


def list_of(check: Check, most: int = MOST_ITEMS) -> Check:
    """Takes a list of what `check` takes."""

    def each(name: str, value: Any) -> None:
        if not isinstance(value, list) or len(value) > most:
            raise refusal(name, f"a list of at most {most}", value)
        for index, item in enumerate(value):
            check(f"{name}[{index}]", item)

    return each


def mapping_of(check: Check, names: Check = anything) -> Check:
    """Takes an object whose names `names` takes, and whose values `check` takes."""

    def each(name: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise refusal(name, "an object", value)
        for key, item in value.items():
            names(f"{name}: name", key)
            check(f"{name}.{key!r:.60}", item)

    return each


def fields(checks: Mapping[str, Check], *, maybe: Mapping[str, Check] | None = None, further: bool = False) -> Check:
    """Takes an object with these fields, and those of `maybe`; others only where there may be `further` ones."""
    may_be = maybe or {}

    def each(name: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise refusal(name, "an object", value)
        for field, check in checks.items():
            if field not in value:
                raise ValueError(f"{name}: expected the field {field}, got none")
            check(f"{name}.{field}", value[field])
        for field in value.keys() & may_be.keys():
            may_be[field](f"{name}.{field}", value[field])
        odd = sorted(value.keys() - checks.keys() - may_be.keys())
        if odd and not further:
            raise refusal(name, "no further fields", odd[0])

    return each
