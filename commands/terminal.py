"""Text for people: what a model or a file's name says must not drive the terminal that shows it."""

import signal
import sys
import threading
from typing import Any, TextIO

# ESC begins sequences that move the cursor, name the window or ask the terminal to type; C1 controls are such, too.
_CONTROLS: dict[int, int | None] = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_CONTROLS |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD) | {ord("\r"): None}


def without_controls(text: str) -> str:
    """A text with a picture in place of each control character but tab and line end."""
    return text.translate(_CONTROLS)


def say(text: str, end: str = "\n", file: TextIO | None = None) -> None:
    """Print a text, on standard output by default: on a terminal without control characters, elsewhere as it is."""
    stream = sys.stdout if file is None else file
    print(without_controls(text) if stream.isatty() else text, end=end, file=stream, flush=True)


def complain(text: str) -> None:
    """Print a line on standard error."""
    say(f"specstep: {text}", file=sys.stderr)


def take_any_text() -> None:
    """Have standard output write what its encoding lacks as `\\xe9`, where it would raise."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)  # not of what a test puts in its place
    if reconfigure is not None and sys.stdout.errors in ("strict", "surrogateescape"):
        reconfigure(errors="backslashreplace")


def end_at_second_interrupt() -> None:
    """Have the first Ctrl-C raise KeyboardInterrupt, and the second end the process at once, whatever it does. Where
    the shell has it ignored, as for a command in the background, or a program handles it, that stays."""

    def interrupt(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt

    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupt)
