"""Has graphs become Python code where they run, not where they change: a trace changes one six times, and runs none."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from torch.fx import GraphModule

RECOMPILE = GraphModule.recompile


@contextlib.contextmanager
def code_written_when_run() -> Iterator[None]:
    """Within it, a graph module's `recompile` only notes that there is something to be done; the module's next call
    does it, within this block or after it."""
    with patch.object(GraphModule, "recompile", _note):
        yield


def _note(module: GraphModule) -> None:
    for name in ("in_spec", "out_spec"):  # which are read from the module
        if (given := getattr(module.graph._codegen, "pytree_info", None)) is not None:
            setattr(module, f"_{name}", getattr(given, name))
    module.__dict__.pop("_code", None)
    type(module).forward = _write_and_run


def _write_and_run(module: GraphModule, *given: Any, **named: Any) -> Any:
    RECOMPILE(module)
    return type(module).forward(module, *given, **named)
