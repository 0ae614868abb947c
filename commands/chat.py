"""`specstep chat`."""

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import InputError
from .build_options import ENGINE, add_model_options, given_build
from .conversation import History, add_template_options, given_arguments
from .device_option import add_device_option
from .learning_options import add_learning_options, given_learning
from .progress import Progress
from .prompts import BOM
from .sampling_options import add_sampling_options, given_sampling
from .stats import speed
from .terminal import complain, say

if TYPE_CHECKING:
    from ..runtime.asked.request import Request
    from ..runtime.asked.sampling_params import SamplingParams
    from ..runtime.engine import Engine
    from ..runtime.stream import Stream

HELP = "talk to an engine, or a model, in the terminal"
COMMANDS = """/reset  forget the conversation, but not the system message
/help   show this
/exit   leave, as Ctrl-D does
Ctrl-C stops an answer. Any other line is yours to say."""
EXAMPLES = f"""examples:
  specstep chat smollm2-135m
  specstep chat Qwen2.5-Coder-0.5B-Instruct-Q4_K_M.gguf --max-seq-len 8192
  specstep chat engines/smol
  specstep chat engines/qwen3 --system "Be brief." --template-arg enable_thinking=false
  specstep chat engines/smol --temperature 0.7 --top-p 0.9
  specstep chat engines/smol < questions.txt  # a line is a turn

in the conversation:
{COMMANDS}"""
PROMPT = "> "
HINT = "Ctrl-C again, Ctrl-D or /exit leaves"


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("engine", metavar="ENGINE", help=ENGINE)
    add_template_options(parser)
    add("--max-new-tokens", type=int, metavar="N", help="most tokens of an answer (default: up to the engine's limit)")
    add("--stats", action="store_true", help="print the speed of each answer on standard error")
    add_device_option(parser)
    add_learning_options(parser)
    add_sampling_options(parser, choices=False)
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    arguments, asked = given_arguments(options), given_sampling(options)
    from ..model_engines import engine_of
    from ..runtime.engine import load

    with Progress() as report:
        directory = engine_of(options.engine, report, given_build(options), device=options.device)
    with load(directory, device=options.device, **given_learning(options)) as engine:
        asked.tell(engine)
        history = History(engine, options.system, arguments, options.max_new_tokens)
        chat = Chat(engine, history, options.max_new_tokens, options.stats, asked.over(engine.recommended, None))
        chat.request(history.prompt("hello")[1])  # what no turn could mend is refused now
        return chat.in_terminal() if sys.stdin.isatty() and sys.stdout.isatty() else chat.in_pipe()


class Chat:
    """A conversation over lines of text: each is a turn or a command, and answers stream to standard output."""

    def __init__(
        self,
        engine: "Engine",
        history: History,
        max_new_tokens: int | None,
        stats: bool,
        sampling: "SamplingParams | None" = None,
    ):
        self._engine, self._history = engine, history
        self._max_new_tokens, self._stats, self._sampling = max_new_tokens, stats, sampling
        self._stream: Stream | None = None  # of the answer under way

    def request(self, tokens: list[int]) -> "Request":
        """A request for an answer. Raises InputError."""
        return self._engine.request(tokens, self._max_new_tokens, sampling=self._sampling)

    def in_pipe(self) -> int:
        """Answer the lines of standard input -> exit status: 2 where a line could not be answered."""
        failed = False
        try:
            for number, line in enumerate(sys.stdin):
                said = (line if number else line.removeprefix(BOM)).strip()
                if said == "/exit":
                    break
                failed |= not self._take(said)
        except UnicodeDecodeError as error:
            raise InputError(f"expected text in {error.encoding} on standard input, got other bytes") from None
        return 2 if failed else 0

    def in_terminal(self) -> int:
        """Ask for lines and answer them until the user leaves -> exit status. Ctrl-C stops an answer; without one under
        way, the first at an empty prompt gives a hint and the second leaves."""
        with contextlib.suppress(ImportError):  # history and editing for `input`
            import readline  # noqa: F401
        say(f"{COMMANDS}\n")
        warned = False
        with self._interruptible():
            while True:
                try:
                    line = input(PROMPT).strip()
                    warned = False
                    if line == "/exit":
                        return 0
                    self._take(line)
                except EOFError:
                    say("")
                    return 0
                except KeyboardInterrupt:
                    say("")
                    if warned:
                        return 0
                    say(HINT)
                    warned = True

    def _take(self, line: str) -> bool:
        """Do what a line says -> whether that could be done."""
        if line == "/help":
            say(COMMANDS)
        elif line == "/reset":
            self._history.reset()
        elif line:
            try:
                self._answer(line)
            except InputError as error:  # the conversation goes on without this turn
                complain(str(error))
                return False
        return True

    def _answer(self, line: str) -> None:
        """Stream the answer to a line, and keep as much of it as was shown."""
        messages, tokens, dropped = self._history.prompt(line)
        if dropped:
            longest = self._engine.spec.max_seq_len
            complain(f"forgot the oldest turns ({dropped}): max_seq_len is {longest}")
        request = self.request(tokens)
        started, said = time.perf_counter(), ""
        try:
            self._stream = self._engine.submit(request)
            for piece in self._stream:
                said += piece.text
                say(piece.text, end="")
            say("")
            self._history.answered(messages, said)
        finally:
            self._stream = None
        if self._stats:
            say(speed([request], time.perf_counter() - started), file=sys.stderr)

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl-C cancels the answer under way and raises nothing, so that nothing is left half done; the second one
        raises."""

        def interrupt(*_: object) -> None:
            stream, self._stream = self._stream, None
            if stream is None:
                raise KeyboardInterrupt
            stream.cancel()

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
