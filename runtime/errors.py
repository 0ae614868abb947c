"""Errors that a user can act on. The command line prints their message in one line and exits with status 2."""


class SpecstepError(ValueError):
    """Base of all errors that are about the user's input or files, not about a defect."""


class EngineError(SpecstepError):
    """An engine directory that cannot be loaded here: says what was expected, what was found and what to do."""


class InputError(SpecstepError):
    """A prompt or a parameter that an engine cannot take."""


class BuildError(SpecstepError):
    """A model, drafter or option that no engine can be built from."""
