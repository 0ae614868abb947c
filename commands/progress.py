"""How commands show how far they are."""

import os
import sys
import threading
import time
import unicodedata
from types import TracebackType
from typing import Self

LASTING = "warning:"  # messages that start so are not overwritten
CLEAR_LINE = "\r\x1b[K"


class Progress:
    """Messages on standard error, each with the time since the start:
    `with Progress() as progress: progress("loading")`.

    On a terminal one line shows the last message and its time goes on; the last line stays when the block ends, however
    it ends, and so do warnings. Elsewhere each message is a line of its own.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._terminal = sys.stderr.fileno() if _is_terminal() else None
        self._message = ""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Self:
        if self._terminal is not None:
            self._ticker.start()
        return self

    def __call__(self, message: str) -> None:
        """Show one message."""
        message = "".join(char if char.isprintable() else " " for char in message)
        if self._terminal is None:
            print(self._line(message), file=sys.stderr, flush=True)
            return
        with self._lock:
            if message.startswith(LASTING):
                self._write(f"{CLEAR_LINE}{self._line(message)}\n")
            else:
                self._message = message
            self._draw()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._terminal is None:
            return
        self._ended.set()
        self._ticker.join()
        if self._message:
            self._write(f"{CLEAR_LINE}{self._line(self._message)}\n")

    def _tick(self) -> None:
        while not self._ended.wait(1.0):
            with self._lock:
                self._draw()

    def _draw(self) -> None:
        if self._message:
            assert self._terminal is not None
            self._write(CLEAR_LINE + shortened(self._line(self._message), _columns(self._terminal) - 1))

    def _line(self, message: str) -> str:
        return f"specstep: {clock(time.monotonic() - self._started)} {message}"

    def _write(self, text: str) -> None:
        """Past Python's buffer, whose lock a process that is forked meanwhile would inherit."""
        assert self._terminal is not None
        os.write(self._terminal, text.encode(sys.stderr.encoding or "ascii", "backslashreplace"))


def clock(seconds: float) -> str:
    """4.2 -> 0:04, 3700 -> 1:01:40."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shortened(text: str, columns: int) -> str:
    """As much of a text as fits into so many columns; wide characters take two."""
    taken = 0
    for index, char in enumerate(text):
        taken += 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if taken > columns:
            return text[:index]
    return text


def _is_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _columns(terminal: int) -> int:
    try:
        return os.get_terminal_size(terminal).columns or 80
    except OSError:
        return 80
