"""How commands speak while they work."""

import sys


def report(line: str) -> None:
    """One line about how far a command is, on standard error."""
    print(f"specstep: {line}", file=sys.stderr, flush=True)
