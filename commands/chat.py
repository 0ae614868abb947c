"""`specstep chat`."""

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .build_options import ENGINE, add_model_options, given_build
from .conversation import History, add_template_options, given_arguments
from .device_option import add_device_option
from .learning_options import add_learning_options, given_learning
from .progress import Progress
from .prompts import BOM
from .sampling_options import add_sampling_options, given_sampling
from .stats import speed
from .terminal import complain, say, without_controls

if TYPE_CHECKING:
    from ..runtime.asked.request import Request
    from ..runtime.asked.sampling_params import SamplingParams
    from ..runtime.engine import Engine
    from ..runtime.stream import Stream
    from ..serving.tools.conversation import Reading
    from .chat_tools import ChatTools

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
  specstep chat engines/qwen3 --tools tools.json # calls are printed, you type what they give
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
    add(
        "--tools", metavar="FILE", help="functions that the model may call, OpenAI's `tools` in JSON: its calls "
        "are printed, and the next line that you type is the result (needs the extra `grammar`)"
    )  # fmt: skip
    add("--tool-format", metavar="NAME", help="how the model writes calls, as hermes or llama3 (docs/serving.md has "
        "all; default: as the engine has it)")  # fmt: skip
    add("--stats", action="store_true", help="print the speed of each answer on standard error")
    add_device_option(parser)
    add_learning_options(parser)
    add_sampling_options(parser, choices=False)
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    arguments, asked = given_arguments(options), given_sampling(options)
    from .chat_tools import ChatTools, given_tools

    tools = given_tools(options.tools)
    from ..model_engines import engine_of
    from ..runtime.load import load

    with Progress() as progress:
        directory = engine_of(options.engine, progress, given_build(options), device=options.device)
    with load(directory, device=options.device, **given_learning(options)) as engine:
        asked.tell(engine)
        known = ChatTools(engine, tools, options.tool_format)
        history = History(engine, options.system, arguments, options.max_new_tokens, known.encode)
        sampling = asked.over(engine.recommended, None)
        chat = Chat(engine, history, options.max_new_tokens, options.stats, sampling, known)
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
        tools: "ChatTools | None" = None,
    ):
        """tools: what the model may call, None for nothing."""
        self._engine, self._history = engine, history
        self._max_new_tokens, self._stats, self._sampling = max_new_tokens, stats, sampling
        from .chat_tools import ChatTools

        self._tools = tools or ChatTools(engine, [])
        self._stream: Stream | None = None  # of the answer under way
        self._ask: Callable[[str], str] = input  # for the result of a call

    def request(self, tokens: list[int], reading: "Reading | None" = None) -> "Request":
        """A request for an answer, which may have calls where it is read. Raises InputError."""
        reading = reading or self._tools.reading(tokens)
        sampling = self._tools.sampling(self._sampling, reading)
        return self._engine.request(tokens, self._max_new_tokens, sampling=sampling)

    def in_pipe(self) -> int:
        """Answer the lines of standard input -> exit status: 2 where a line could not be answered."""
        failed, lines = False, iter(sys.stdin)
        self._ask = lambda prompt: next(lines, "").strip()
        try:
            for number, line in enumerate(lines):
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
                except UnicodeError:  # what was typed or pasted; the conversation goes on without it
                    complain(f"expected text in {sys.stdin.encoding}, got other bytes")
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
        """Stream the answer to a line, with the results of what it calls, and keep as much of it as was shown."""
        messages, tokens, dropped = self._history.prompt(line)
        while True:
            if dropped:
                longest = self._engine.spec.max_seq_len
                complain(f"forgot the oldest turns ({dropped}): max_seq_len is {longest}")
            said = self._say(tokens)
            calls = said.get("tool_calls")
            if not calls:
                self._history.answered(messages, said)
                return
            messages, tokens, dropped = self._history.fitting([*messages, said, *map(self._result, calls)])

    def _say(self, tokens: list[int]) -> dict[str, Any]:
        """Stream the answer to a prompt -> its message, as far as it was said."""
        from .chat_tools import Printed

        reading = self._tools.reading(tokens)
        request = self.request(tokens, reading)
        printed, started = Printed(reading), time.perf_counter()
        try:
            self._stream = self._tools.stream(self._engine, request, reading)
            for piece in self._stream:
                printed.push(piece.text)
            printed.push("", last=True)
            say("")
        finally:
            self._stream = None
        if self._stats:
            say(speed([request], time.perf_counter() - started), file=sys.stderr)
        said = printed.message()
        if "tool_calls" in said and (request.finish_reason != "stop" or printed.is_cut):  # cut: nobody can answer it
            return {"role": "assistant", "content": said["content"]} if said["content"] else {}
        return said

    def _result(self, call: dict[str, Any]) -> dict[str, Any]:
        """The message with the result of a call, which the user gives."""
        name = without_controls(call["function"]["name"])
        return {"role": "tool", "tool_call_id": call["id"], "content": self._ask(f"{name} -> ")}

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
