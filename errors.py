"""Errors that a user can act on. The command line prints their message in one line and exits with status 2."""

import contextlib
from collections.abc import Iterator

EXIT_BROKEN = 70  # of a server whose engine broke, EX_SOFTWARE of sysexits.h: a supervisor is to start another one


class SpecstepError(ValueError):
    """Base of all errors that are about the user's input or files, not about a defect."""


class EngineError(SpecstepError):
    """An engine directory that cannot be loaded here: says what was expected, what was found and what to do."""


class InputError(SpecstepError):
    """A prompt or a parameter that an engine cannot take."""


class BuildError(SpecstepError):
    """A model, drafter or option that no engine can be built from."""


class MissingPackageError(BuildError, EngineError, InputError):
    """A package that is not installed: says which extra brings it."""


def one_line(error: BaseException) -> str:
    """The first line of what an error says, without control characters; its type where it says nothing."""
    first, *_ = [*filter(str.strip, str(error).splitlines()), type(error).__name__]
    return "".join(character if character.isprintable() else "?" for character in first)


@contextlib.contextmanager
def needs_extra(extra: str, purpose: str) -> Iterator[None]:
    """Imports inside the block that fail for want of a package raise MissingPackageError, which names the extra of
    this package that brings it; no extra stands for the package itself."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("specstep"):
            raise  # a defect of ours
        raise MissingPackageError(
            f"{purpose}: expected the package {error.name}, which is not installed; "
            f"run `pip install '{f'specstep[{extra}]' if extra else 'specstep'}'`"
        ) from None
