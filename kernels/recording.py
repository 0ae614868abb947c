"""Records what the library's operators do while a function runs: see record.cpp."""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

MOST_INPUTS = 8  # as in record.h


class _Input(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("bytes", ctypes.c_int64))


class _Call(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("begin", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("read", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("input", _Input * MOST_INPUTS),
    )


class RecordedCall(NamedTuple):
    """One call of an operator. begin, end: nanoseconds, as `time.perf_counter_ns` counts them on Linux. read: bytes of
    its inputs that it reads, None where it does not say. inputs: address and bytes of the first MOST_INPUTS."""

    name: str
    begin: int
    end: int
    read: int | None
    inputs: tuple[tuple[int, int], ...]


def can_record() -> bool:
    """Whether a library is loaded that can."""
    return hasattr(ctypes.CDLL(None), "specstep_start_recording")


def record(run: Callable[[], object]) -> list[RecordedCall]:
    """Run a function -> the calls that compiled models made of operators meanwhile, in this thread, in their order.
    Raises AttributeError where no library is loaded that can record (see `can_record`)."""
    library, calls = ctypes.CDLL(None), ctypes.POINTER(_Call)()  # the library's names are global: see `load_library`
    library.specstep_stop_recording.restype = ctypes.c_int64
    library.specstep_start_recording()
    try:
        run()
    finally:
        count = library.specstep_stop_recording(ctypes.byref(calls))
    return [_read(call) for call in calls[:count]]


def _read(call: _Call) -> RecordedCall:
    inputs = tuple((given.data or 0, given.bytes) for given in call.input[: call.inputs])
    return RecordedCall(call.name.decode(), call.begin, call.end, None if call.read < 0 else call.read, inputs)
