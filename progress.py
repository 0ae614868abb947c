"""How a long call says how far it is."""

from collections.abc import Callable

OnProgress = Callable[[str], None]  # takes one line at a time


def silent(line: str) -> None:
    """Takes a line and says nothing."""
