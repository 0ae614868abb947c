"""What a terminal is shown of what models and files say, and how a command ends that is interrupted."""

import ast
import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_session import FakeSession
from models import tiny_tokenizer
from specstep.cli import main
from specstep.commands.terminal import complain, say, without_controls
from specstep.runtime.engine import Engine
from specstep.runtime.text.tokenizer import EngineTokenizer

TITLE = "\x1b]0;owned\x07\x1b[31mred\r\x9b2J"
SEEN = "␛]0;owned␇␛[31mred\ufffd2J"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_no_control_characters_and_a_pipe_all(monkeypatch):
    assert without_controls(f"a\tb\n{TITLE}é") == f"a\tb\n{SEEN}é"
    for stream, got in ((Terminal(), SEEN), (io.StringIO(), TITLE)):
        monkeypatch.setattr(sys, "stdout", stream)
        say(TITLE, end="")
        assert stream.getvalue() == got
    monkeypatch.setattr(sys, "stderr", Terminal())
    complain(TITLE)
    assert sys.stderr.getvalue() == f"specstep: {SEEN}\n"


@pytest.fixture
def says(monkeypatch):
    """`says(text)`: has `generate` run an engine that says it."""
    text = EngineTokenizer(tiny_tokenizer().backend_tokenizer, None, {})

    def say_it(said):
        tokens = text.encode_part(said)
        session = FakeSession(1, vocabulary=258, follow=lambda before: [*tokens, *[40] * 9][len(before) - 1])
        monkeypatch.setattr("specstep.runtime.load.load", lambda *_, **__: Engine(session, text))
        monkeypatch.setattr("specstep.model_engines.engine_of", lambda engine, *_, **__: engine)
        return ["generate", "DIR", "--prompt", "x", "--raw", "--max-new-tokens", str(len(tokens))]

    return say_it


def test_what_a_model_says_does_not_drive_the_terminal(says, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main(says(TITLE)) == 0
    assert sys.stdout.getvalue() == f"{SEEN}\n"


@pytest.mark.parametrize("more", [[], ["--n", "2", "--temperature", "1", "--seed", "0"]])
def test_text_that_the_output_cannot_encode_is_escaped(says, more, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    arguments = says("é€")
    assert main(arguments + more) == 0
    assert more or written.getvalue() == b"\\xe9\\u20ac\n"


def test_commands_print_through_it():
    """Whatever a command prints may be of a model or a file."""
    folder = Path(__file__).parents[2]
    for path in [folder / "cli.py", *(folder / "commands").glob("*.py")]:
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        printed = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
        assert not printed or path.stem in ("terminal", "progress"), path


def test_a_second_interrupt_ends_at_once():
    program = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored where these tests run behind it
from specstep import cli
class Sleeps:
    HELP = EXAMPLES = ""
    add_options = staticmethod(lambda parser: None)
    def run(options):
        try:
            print("runs", flush=True)
            time.sleep(60)
        finally:
            print("ends", flush=True)
            time.sleep(60)
cli.COMMANDS["sleep"] = Sleeps
cli.main(["sleep"])
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        for said in (b"runs\n", b"ends\n"):
            assert running.stdout.readline() == said
            running.send_signal(signal.SIGINT)
        assert running.wait(30) == -signal.SIGINT
        assert running.stderr.read() == b""


def test_an_ignored_interrupt_stays_ignored():
    """As a shell has it for a command in the background."""
    program = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from specstep.commands.terminal import end_at_second_interrupt
end_at_second_interrupt()
signal.raise_signal(signal.SIGINT)
print("goes on")
"""
    assert subprocess.check_output([sys.executable, "-c", program]) == b"goes on\n"
