"""`specstep chat`: a conversation through a pipe and in a terminal, and a history that fits."""

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import specstep
from models import CHANNEL_IDS, save_channel_model, tiny_tokenizer, token_of
from specstep.cli import main
from specstep.commands.chat import COMMANDS, HINT, Chat
from specstep.commands.chat_tools import ChatTools, Printed
from specstep.commands.conversation import History
from specstep.runtime.asked.sampling_params import SamplingParams
from specstep.runtime.calls.formats import HERMES
from specstep.runtime.text import reasoning
from specstep.runtime.text.tokenizer import EngineTokenizer
from specstep.serving.tools.asked import tools_of
from specstep.serving.tools.conversation import Reading

SYSTEM = {"role": "system", "content": "be brief"}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def chat(monkeypatch, capsys, lines, *arguments):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    status = main(["chat", *map(str, arguments)])
    return status, *capsys.readouterr()


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_bytes_that_are_no_text_end_in_one_line(command, engine_folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    assert main([command, str(engine_folder)]) == 2
    assert "expected text in utf-8 on standard input, got other bytes" in capsys.readouterr().err.splitlines()[-1]


def test_bytes_that_are_no_text_lose_their_turn_alone_at_a_terminal(engine_folder, monkeypatch, capsys):
    typed = iter([UnicodeDecodeError("utf-8", b"\xe9", 0, 1, "unexpected end"), "/help", EOFError()])

    def ask(_):
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", ask)
    with specstep.load(engine_folder) as engine:
        assert Chat(engine, History(engine, None, {}), None, stats=False).in_terminal() == 0
    out, err = capsys.readouterr()
    assert "got other bytes" in err and out.count(COMMANDS) == 2


def test_a_line_is_a_turn_of_one_conversation(engine_folder, monkeypatch, capsys):
    options = ["--system", "be brief", "--max-new-tokens", 12, "--stats"]
    status, out, err = chat(monkeypatch, capsys, ["hello", "", "and you?"], engine_folder, *options)
    with specstep.load(engine_folder) as engine:
        first = engine.generate([SYSTEM, user("hello")], 12).text
        second = engine.generate([SYSTEM, user("hello"), assistant(first), user("and you?")], 12).text
    assert status == 0
    assert out == f"{first}\n{second}\n"
    assert len(re.findall(r"tokens/s, .* tokens per step", err)) == 2


def test_answers_are_sampled_and_end_at_stop_strings(engine_folder, monkeypatch, capsys):
    options = ["--max-new-tokens", 30, "--temperature", "1.5", "--seed", 7]
    with specstep.load(engine_folder) as engine:
        sampling = {"temperature": 1.5, "seed": 7}
        free = engine.generate([user("hello")], 30, sampling=sampling).text
        stop = free[len(free) // 2 :][:2]
        cut = engine.generate([user("hello")], 30, sampling=sampling | {"stop": stop}).text
    for more, said in (([], free), (["--stop", stop], cut)):
        status, out, _ = chat(monkeypatch, capsys, ["hello"], engine_folder, *options, *more)
        assert (status, out) == (0, f"{said}\n")
    assert free.startswith(cut) and len(cut) < len(free)


def test_commands_in_a_pipe(engine_folder, monkeypatch, capsys):
    lines = ["hello", "/reset", "hello", "/help", "/exit", "never asked"]
    status, out, _ = chat(monkeypatch, capsys, lines, engine_folder, "--max-new-tokens", 6)
    with specstep.load(engine_folder) as engine:
        answer = engine.generate([user("hello")], 6).text
    assert status == 0
    assert out.startswith(f"{answer}\n{answer}\n/reset  forget")


def test_a_turn_that_does_not_fit_is_said_and_the_others_go_on(engine_folder, monkeypatch, capsys):
    lines = ["x" * 90, "y" * 90, "x" * 400, "hello"]
    status, out, err = chat(monkeypatch, capsys, lines, engine_folder, "--max-new-tokens", 6)
    assert status == 2
    assert err.startswith("specstep: forgot the oldest turns (1): max_seq_len is 192\n")
    assert "specstep: prompt: expected at most 191 tokens" in err and "Traceback" not in err
    assert out.count("\n") >= 3


def test_chat_template_kwargs_reach_the_template(engine_folder, monkeypatch, capsys):
    asked = []
    real = EngineTokenizer.encode_messages
    monkeypatch.setattr(
        EngineTokenizer,
        "encode_messages",
        lambda self, messages, arguments=None, name="prompt": (asked.append(arguments), real(self, messages))[1],
    )
    options = ["--template-arg", "enable_thinking=false", "--template-arg", "tone=dry", "--max-new-tokens", 2]
    assert chat(monkeypatch, capsys, ["hello"], engine_folder, *options)[0] == 0
    assert asked[-1] == {"enable_thinking": False, "tone": "dry"}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--template-arg", "x"], "template-arg: expected NAME=VALUE, got 'x'"),
        (["--template-arg", "messages=[]"], "chat_template_kwargs: expected names other than"),
        (["--max-new-tokens", "0"], "max_new_tokens: expected an integer of at least 1, got 0"),
        (["--system", "x" * 300], "expected at most 191 tokens"),
        (["--top-p", "0"], "top_p: expected a number above 0 and up to 1, got 0"),
    ],
)
def test_what_no_turn_could_mend_is_refused_at_once(arguments, error, engine_folder, monkeypatch, capsys):
    status, out, err = chat(monkeypatch, capsys, ["hello"], engine_folder, *arguments)
    assert (status, out) == (2, "")
    assert error in err and len(err.splitlines()) == 1


def small(max_seq_len, template=None):
    """What a history needs of an engine."""
    reference = tiny_tokenizer()
    tokenizer = EngineTokenizer(reference.backend_tokenizer, template or reference.chat_template, {"bos_token": "<s>"})
    return SimpleNamespace(tokenizer=tokenizer, spec=SimpleNamespace(max_seq_len=max_seq_len))


def test_history_drops_the_oldest_turns_and_keeps_the_system_message():
    history = History(small(120), SYSTEM["content"], {})
    for turn in ("one", "two"):
        messages, _, dropped = history.prompt(turn)
        assert dropped == 0
        history.answered(messages, f"answer {turn}")
    messages, tokens, dropped = history.prompt("three")
    assert dropped == 1
    assert messages == [SYSTEM, user("two"), assistant("answer two"), user("three")]
    assert len(tokens) <= 120 - 120 // 4
    history.answered(messages, "answer three")
    assert history.prompt("x" * 80)[0] == [SYSTEM, user("x" * 80)]
    history.reset()
    assert history.messages == [SYSTEM]


def test_history_leaves_room_for_the_answer_that_was_asked_for():
    history = History(small(120), None, {}, max_new_tokens=5)
    history.answered(history.prompt("x" * 40)[0], "y" * 40)
    assert history.prompt("hi")[2] == 0
    assert history.prompt("x" * 20)[2] == 1


def test_a_question_without_an_answer_is_forgotten():
    alternate = (
        "{% for m in messages %}{% if loop.index0 % 2 != (m.role != 'user') | int %}{{ raise_exception('turns') }}"
    )
    history = History(small(120, alternate + "{% endif %}{{ m.content }}{% endfor %}"), None, {})
    history.answered(history.prompt("one")[0], "")
    assert history.prompt("two")[0] == [user("two")]


class Interrupted:
    """An answer that the user stops after its first word."""

    cancelled = False

    def __iter__(self):
        yield SimpleNamespace(text="half")
        signal.raise_signal(signal.SIGINT)
        if not self.cancelled:
            yield SimpleNamespace(text=" and more")

    def cancel(self):
        self.cancelled = True


def test_a_stopped_answer_stays_in_the_conversation_as_far_as_it_was_said(capsys):
    engine = small(120)
    engine.request, engine.submit = lambda tokens, most, sampling: tokens, lambda request: Interrupted()
    conversation = Chat(engine, History(engine, None, {}), None, stats=False)
    with conversation._interruptible():
        conversation._answer("hello")
        with pytest.raises(KeyboardInterrupt):  # nothing to stop
            signal.raise_signal(signal.SIGINT)
    assert conversation._history.messages == [user("hello"), assistant("half")]
    assert capsys.readouterr().out == "half\n"


GPT_OSS = Path(__file__).parents[1] / "data/chat_templates/gpt_oss.jinja"
WEATHER = {
    "name": "get_weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"]},
}
TOOLS = [{"type": "function", "function": WEATHER}]


def test_a_call_is_printed_and_its_result_asked_for(tmp_path, monkeypatch, capsys):
    """A model of channels: thoughts and calls are apart, and the call stays in the conversation with its result."""
    folder = save_channel_model(tmp_path / "model", GPT_OSS.read_text())
    bias = {CHANNEL_IDS["<|end|>"]: 50.0, token_of(" "): 9.0, token_of("f"): -9.0}
    once = iter([bias, {CHANNEL_IDS["<|end|>"]: 50.0, token_of("f"): 30.0}])
    options = {"drafter": "ngram", "dtype": "float32", "max_seq_len": 1536, "prefill_chunk": 64}
    with specstep.eager(str(folder), **options) as engine:
        known = ChatTools(engine, TOOLS)
        history = History(engine, None, {}, 400, known.encode)
        conversation = Chat(engine, history, 400, False, None, known)
        real = conversation.request

        def request(tokens, reading):
            conversation._sampling = SamplingParams(temperature=1.0, seed=1, logit_bias=next(once))
            return real(tokens, reading)

        monkeypatch.setattr(conversation, "request", request)
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nmild\n"))
        assert conversation.in_pipe() == 0
    assert re.match(r'get_weather {\s*"unit"', capsys.readouterr().out)
    question, call, result, *rest = history.messages
    assert question == user("hello") and call["tool_calls"][0]["function"]["name"] == "get_weather"
    assert result == {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "mild"}
    assert len(rest) == 1 and rest[0]["content"]


def test_reasoning_text_and_calls_are_printed_apart(capsys):
    tools = tools_of(TOOLS, None, None)
    printed = Printed(Reading(reasoning.Reasoning("<think>", "</think>", True), tools, HERMES))
    for piece in ("Hm", ".</think>", "Let me see: ", HERMES.write("get_weather", {"unit": "c"})):
        printed.push(piece)
    printed.push("", last=True)
    assert capsys.readouterr().out == 'Hm.\n\nLet me see:\n\nget_weather {"unit": "c"}'
    said = printed.message()
    assert said["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"unit": "c"}}
    assert (said["content"], said["reasoning_content"]) == ("Let me see:", "Hm.") and not printed.is_cut


def test_a_call_that_is_cut_is_told_from_a_whole_one():
    whole = HERMES.write("get_weather", {"unit": "c"})
    for text, cut in ((whole, False), (whole[: whole.index("unit") + 2], True), ("Well", False)):
        printed = Printed(Reading(None, tools_of(TOOLS, None, None), HERMES))
        printed.push(text, last=True)
        assert printed.is_cut == cut, text


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "expected JSON, got what is none"),
        ("{}", "expected OpenAI's list of tools, got another form"),
        ('[{"type": "web_search"}]', "tools[0].type: expected function or custom"),
        (json.dumps(TOOLS), "expected at most 191 tokens"),
    ],
)
def test_tools_that_cannot_be_told_are_refused_at_once(text, error, engine_folder, tmp_path, monkeypatch, capsys):
    file = tmp_path / "tools.json"
    file.write_text(text)
    status, out, err = chat(monkeypatch, capsys, ["hello"], engine_folder, "--tools", file)
    assert (status, out) == (2, "") and error in err and len(err.splitlines()) == 1


def test_a_form_of_calls_that_is_not_known_is_refused_at_once(engine_folder, monkeypatch, capsys):
    status, out, err = chat(monkeypatch, capsys, ["hello"], engine_folder, "--tool-format", "xml")
    assert (status, out) == (2, "") and "tool-format: expected one of deepseek-v3" in err and "got xml" in err


PROGRAM = """
import sys, time
from specstep.cli import main
from specstep.runtime import load as loading

def slow_at_first(folder, real=loading.load, **options):
    made, answers = real(folder), []
    begin, submit, request = made.session.begin_step, made.submit, made.request
    made.session.begin_step = lambda *given: (time.sleep(0.3 if len(answers) == 1 else 0), begin(*given))[1]
    made.submit = lambda asked: (answers.append(asked), submit(asked))[1]
    made.request = lambda *given, **named: request(*given, **named, ignore_eos=True)
    return made

loading.load = slow_at_first
sys.exit(main(sys.argv[1:]))
"""


class Terminal:
    """A program in a pseudo-terminal of its own."""

    def __init__(self, *arguments):
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=os.environ | {"TERM": "dumb"},
            start_new_session=True,
            preexec_fn=self._prepare,
        )
        os.close(slave)
        self.seen = ""

    @staticmethod
    def _prepare():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs inherit that it is ignored

    def type(self, text):
        os.write(self._master, text.encode())

    def interrupt_prompt(self):
        """Ctrl-C at a prompt. Readline waits for keys a moment after the prompt is seen; a signal that comes before
        that is noticed at the next key only."""
        time.sleep(2)
        self.type("\x03")

    def until(self, pattern, seconds=120):
        """Wait until what was printed since the last call matches -> that text."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen, re.DOTALL)):
            assert time.monotonic() < deadline, f"waited for {pattern!r}, got {self.seen!r}"
            if select.select([self._master], [], [], 1.0)[0]:
                self.seen += os.read(self._master, 4096).decode(errors="replace")
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal(engine_folder):
    with contextlib.closing(Terminal("chat", engine_folder, "--max-new-tokens", 60, "--stats")) as opened:
        yield opened


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal):
    terminal.until("> $")
    terminal.type("hello\n")
    terminal.until("hello\r\n.")
    terminal.type("\x03")
    stopped = terminal.until("([0-9]+) tokens in .*> $")
    assert 0 < int(re.search("([0-9]+) tokens in", stopped)[1]) < 60
    terminal.type("again\n")
    assert "60 tokens in" in terminal.until("tokens in .*> $")
    terminal.type("/exit\n")
    assert terminal.process.wait(60) == 0


def test_ctrl_c_at_the_prompt_warns_first_and_ctrl_d_leaves(terminal):
    terminal.until("> $")
    terminal.interrupt_prompt()
    assert HINT in terminal.until("leaves\r\n> $")
    terminal.type("/help\n")
    terminal.until("as Ctrl-D does.*> $")
    terminal.interrupt_prompt()
    terminal.until("leaves\r\n> $")
    terminal.interrupt_prompt()
    assert terminal.process.wait(60) == 0


def test_ctrl_d_leaves(terminal):
    terminal.until("> $")
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0
