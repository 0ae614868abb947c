"""Drafters that are named on the command line and come from elsewhere: "package.module:factory"."""

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Iterator

from ...errors import BuildError
from ...graphs.drafters.drafter import Scorer
from ..source import Source
from .blame import describe_error

NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_factory(name: str) -> bool:
    """Whether a drafter's name is that of a factory."""
    return NAME.fullmatch(name) is not None and not os.path.exists(name)


def call_factory(name: str, target: Source) -> Scorer:
    """Import `package.module:factory`, from the current directory too, and call it with the loaded target -> its
    scorer. Raises BuildError."""
    place, _, attribute = name.partition(":")
    with _current_directory():
        try:
            factory = importlib.import_module(place)
            for part in attribute.split("."):
                factory = getattr(factory, part)
        except (ImportError, AttributeError) as error:
            raise BuildError(f"drafter: {name}: expected a factory that can be imported, got {error}") from error
        try:
            scorer = factory(target)  # type: ignore[operator]
        except BuildError:
            raise
        except Exception as error:
            raise BuildError(f"drafter: {name}: {describe_error(error)}") from error
    if not isinstance(scorer, Scorer):
        raise BuildError(f"drafter: {name}: expected a specstep.Scorer, got {type(scorer).__name__}")
    return scorer


@contextlib.contextmanager
def _current_directory() -> Iterator[None]:
    """Imports inside the block find modules of the current directory, after all others."""
    here = os.getcwd()
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)
