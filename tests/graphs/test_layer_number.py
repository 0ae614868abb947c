"""The number of a layer notes who looks at it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from specstep.graphs.layer_number import LayerNumber, number_of

LOOKS: list[Callable[[Any], Any]] = [
    lambda number: number == 3,
    lambda number: number >= 2 and True,
    lambda number: (number + 1, 1 + number, 7 % number, number / 2),
    lambda number: ["a", "b", "c", "d", "e"][number],
    lambda number: {3: "three"}[number],
    lambda number: list(range(9))[:number],
    lambda number: (f"layer.{number}", str(number), repr(number)),
    lambda number: (bool(number), float(number), int(number), number.bit_length()),
    lambda number: (torch.ones(2) * number).tolist(),
    lambda number: [kind for place, kind in enumerate("abcdef") if place == number],
]


@pytest.mark.parametrize("look", LOOKS)
def test_who_looks_gets_what_an_int_would_give_and_is_noted(look: Callable[[Any], Any]) -> None:
    number = LayerNumber(3)
    assert look(number) == look(3) and number.read


def test_what_tells_no_number_from_another_is_no_look() -> None:
    number = LayerNumber(3)
    assert number_of(number) == 3 and number_of(3) == 3 and number is not None and isinstance(number, int)  # type: ignore[arg-type]
    assert not number.read
