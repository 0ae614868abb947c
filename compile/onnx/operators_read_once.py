"""Has PyTorch's exporter read its translations of operators once a process."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from torch.onnx._internal.exporter import _registration

_read: dict[Any, Any] = {}  # by what it was asked for


@contextlib.contextmanager
def operators_read_once() -> Iterator[None]:
    """Within it, a registry is a copy of the first one. The exporter parses the source of all translations for each
    program anew: a fifth of the time of an export."""
    registry = getattr(_registration, "ONNXRegistry", None)
    read = getattr(registry, "from_torchlib", None)
    if registry is None or read is None:  # another version of PyTorch
        yield
        return

    def read_once(*given: Any, **named: Any) -> Any:
        key = given, tuple(named.items())
        if key not in _read:
            _read[key] = read(*given, **named)
        own = copy.copy(_read[key])
        own.functions = {target: list(found) for target, found in own.functions.items()}
        return own

    with patch.object(registry, "from_torchlib", staticmethod(read_once)):
        yield
