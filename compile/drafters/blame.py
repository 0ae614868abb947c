"""Which line of somebody else's code an error comes from."""

import linecache
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType

INSTALLED = {"site-packages", "dist-packages"}
OURS = {"", "specstep", "torch", "transformers", *sys.stdlib_module_names}  # "": code that torch generates
MODELS = "transformers.models."


def describe_error(error: BaseException) -> str:
    """`file:line: the source line: expected ..., got the error` in one line; without a line where no code but ours was
    involved."""
    line = line_of(error)
    return f"{line}: {reason_of(error)}" if line else reason_of(error)


def line_of(error: BaseException) -> str | None:
    """The innermost line that is neither ours nor a library's, of an error or of what it was raised from."""
    seen: BaseException | None = error
    while seen is not None:
        if line := _innermost(_walk(seen.__traceback__)):
            return line
        seen = seen.__cause__ or seen.__context__
    return None


def model_line(error: BaseException) -> str | None:
    """The innermost line of a model's code in transformers that an error comes from."""
    frames = [(f, n) for f, n in _walk(error.__traceback__) if f.f_globals.get("__name__", "").startswith(MODELS)]
    return _named(frames[-1][0].f_code.co_filename, frames[-1][1]) if frames else None


def running_line(outermost: str) -> str | None:
    """The innermost such line of the code that is running now, called from a module of ours of that name."""
    frames: list[tuple[FrameType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (frames and frame.f_globals.get("__name__") == outermost):
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return _innermost(reversed(frames))


def _walk(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> str | None:
    """Of installed packages only where no other code is involved: a scorer calls numpy and the like."""
    found = [
        (frame.f_code.co_filename, number)
        for frame, number in frames
        if frame.f_globals.get("__name__", "").partition(".")[0] not in OURS
    ]
    own = [place for place in found if not INSTALLED.intersection(Path(place[0]).parts)]
    for file, number in (own or found)[-1:]:
        return _named(file, number)
    return None


def _named(file: str, number: int) -> str:
    return f"{Path(file).name}:{number}: `{linecache.getline(file, number).strip()}`"


def reason_of(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
