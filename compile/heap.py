"""Memory that the C library keeps of what a process gave back."""

import ctypes
from contextlib import suppress


def give_back() -> None:
    """Hand to the system what the heap holds and nothing uses, where the C library can. After a model was read that is
    half of a process's memory."""
    with suppress(OSError, AttributeError):  # glibc alone
        ctypes.CDLL(None).malloc_trim(0)
