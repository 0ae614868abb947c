"""Names the sizes that inputs of a program share once."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import sympy  # type: ignore[import-untyped]
from torch._dynamo.source import GetItemSource, LocalSource, TensorProperty, TensorPropertySource
from torch.fx.experimental.symbolic_shapes import ShapeEnv

_CREATE = "create_symbol"


@contextlib.contextmanager
def sizes_named_once(shapes: Sequence[Mapping[int, Any]]) -> Iterator[None]:
    """Within it, the exporter has one symbol for all sizes that one Dim stands for. It makes one for each, and learns
    from operations that they are equal: of 120 caches, that takes a fifth of a trace.

    shapes: for each input, none of which is a list, the Dims of its dimensions.
    """
    create, known = getattr(ShapeEnv, _CREATE, None), dict[tuple[ShapeEnv, int], sympy.Symbol]()

    def create_once(env: Any, *given: Any, **named: Any) -> sympy.Expr:
        source = given[1] if len(given) > 1 else named["source"]
        dim = _dim(source, shapes)
        if dim is None:
            return create(env, *given, **named)  # type: ignore[misc]
        key = env, id(dim)
        if key not in known:
            known[key] = create(env, *given, **named)  # type: ignore[misc]
        elif known[key] in env.var_to_sources:
            env.source_to_var[source.name] = known[key]
            env.var_to_sources[known[key]].append(source)
        return known[key]

    with patch.object(ShapeEnv, _CREATE, create_once) if create is not None else contextlib.nullcontext():
        yield


def _dim(source: Any, shapes: Sequence[Mapping[int, Any]]) -> Any:
    """The Dim of a size of an input; None for any other source, as a stride."""
    if not isinstance(source, TensorPropertySource) or source.prop is not TensorProperty.SIZE:
        return None
    given = source.base
    if not isinstance(given, GetItemSource) or not isinstance(given.base, LocalSource):
        return None
    number, place = given.index, source.idx
    if not isinstance(number, int) or number >= len(shapes) or place is None:
        return None
    return shapes[number].get(place)
