"""What is shown while a command works: one line that moves on a terminal, plain lines elsewhere."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import gguf
import numpy
import pytest
from models import save_model
from specstep.commands.progress import clock, shortened
from tokenizers import pre_tokenizers

STAGES = """
import sys, time
from specstep.commands.progress import Progress
with Progress() as progress:
    progress("loading the model")
    progress("warning: the model is odd")
    progress("compiling " + "a long name, " * 30)
    {wait}
    progress("engine written")
print("done")
"""
FAILS = STAGES.replace('progress("engine written")', 'raise SystemExit("specstep: it failed")')
SILENT = """
import sys
from specstep.compile.source import load_source
from transformers.utils import logging
before = logging.get_verbosity(), logging.is_progress_bar_enabled()
load_source(sys.argv[1], "float32", "cpu")
assert before == (logging.get_verbosity(), logging.is_progress_bar_enabled())
"""


RUN = "from specstep.cli import run_command; run_command()"


def piped(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


class Terminal:
    """A program on a pseudo-terminal of a size."""

    def __init__(self, program, columns=60, **environment):
        self.master, slave = pty.openpty()
        termios_size(slave, columns)
        variables = {**os.environ, "TERM": "xterm", **environment}
        command = [sys.executable, "-c", program]
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=variables,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's children ignore it
        )
        os.close(slave)
        self.seen = ""

    def read(self, until=None):
        """All it writes, up to its end or to a word."""
        deadline = time.monotonic() + 120
        while (until is None or until not in self.seen) and time.monotonic() < deadline:
            if not select.select([self.master], [], [], 1.0)[0]:
                continue
            try:
                data = os.read(self.master, 4096)
            except OSError:  # the program has ended
                break
            if not data:
                break
            self.seen += data.decode()
        return self.seen

    def end(self):
        self.read()
        os.close(self.master)
        return self.process.wait(timeout=60)


def termios_size(terminal, columns):
    import fcntl
    import struct
    import termios

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def screen(text):
    """The lines that a terminal shows in the end; a line is redrawn after a carriage return."""
    lines = text.replace("\r\n", "\n").split("\n")
    return [line.rsplit("\r", 1)[-1].replace("\x1b[K", "") for line in lines]


def test_a_log_gets_plain_lines_with_times():
    done = piped(STAGES.format(wait=""))
    lines = done.stderr.splitlines()
    assert [re.sub(r"specstep: \d+:\d\d ", "", line)[:16] for line in lines] == [
        "loading the mode", "warning: the mod", "compiling a long", "engine written",
    ]  # fmt: skip
    assert all(re.match(r"specstep: \d+:\d\d ", line) for line in lines)
    assert "\r" not in done.stderr and "\x1b" not in done.stderr and done.stdout == "done\n"


def test_a_terminal_gets_one_line_whose_time_goes_on():
    terminal = Terminal(STAGES.format(wait="time.sleep(2.5)"))
    assert terminal.end() == 0
    times = re.findall(r"specstep: (\d+:\d\d) compiling", terminal.seen)
    assert len(set(times)) >= 3, "its time does not go on"
    shown = screen(terminal.seen)
    assert [re.sub(r"\d+:\d\d ", "", line) for line in shown] == [
        "specstep: warning: the model is odd", "specstep: engine written", "done", "",
    ]  # fmt: skip


@pytest.mark.parametrize("columns", [20, 60])
def test_a_moving_line_never_wraps(columns):
    terminal = Terminal(STAGES.format(wait=""), columns)
    assert terminal.end() == 0
    parts = re.split(r"\r\n|\r\x1b\[K", terminal.seen)
    assert max(len(part) for part in parts if " comp" in part) == columns - 1


def test_no_colours_and_nothing_moves_on_a_dumb_terminal():
    colour = re.compile(r"\x1b\[[0-9;]*m")
    assert not colour.search(piped(STAGES.format(wait="")).stderr)
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        terminal = Terminal(STAGES.format(wait=""), **environment)
        terminal.end()
        assert not colour.search(terminal.seen)
    assert "\x1b" not in terminal.seen and "loading the model\r\n" in terminal.seen


def test_an_error_comes_on_a_line_of_its_own():
    terminal = Terminal(FAILS.format(wait=""))
    assert terminal.end() == 1
    shown = screen(terminal.seen)
    assert shown[-2:] == ["specstep: it failed", ""] and "compiling a long name" in terminal.seen
    assert "engine written" not in terminal.seen


def test_an_interrupt_ends_with_a_clean_line():
    program = STAGES.format(wait="time.sleep(600)")
    wrapped = (
        "try:\n"
        + "".join(f"    {line}\n" for line in program.splitlines())
        + ("except KeyboardInterrupt:\n    print('specstep: interrupted', file=sys.stderr)\n")
    )
    terminal = Terminal(wrapped)
    terminal.read(until="compiling")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 0
    assert screen(terminal.seen)[-2:] == ["specstep: interrupted", ""]


def test_times_and_widths():
    assert [clock(seconds) for seconds in (0, 4.9, 61, 3700)] == ["0:00", "0:04", "1:01", "1:01:40"]
    assert shortened("abc", 3) == "abc" and shortened("abcd", 3) == "abc"
    assert shortened("北京市", 5) == "北京" and shortened("e\u0301e\u0301e", 2) == "e\u0301e\u0301"


def save_gguf(path):
    """A Llama of one layer as a GGUF file, with a tokenizer of one token per byte."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * 257])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    squares = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {f"blk.0.{name}": (32, 32) for name in squares} | {"token_embd": (len(tokens), 32)}
    shapes |= dict.fromkeys(("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"), (32,))
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", numpy.ones(shape, numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_loading_a_gguf_prints_nothing_and_leaves_the_settings_alone(tmp_path):
    file = save_gguf(tmp_path / "tiny.gguf")
    done = subprocess.run([sys.executable, "-c", SILENT, file], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnx", "inductor"])
def test_a_build_says_its_own_stages_alone(backend, tmp_path):
    """Neither warnings nor bars of other libraries, and no question."""
    model = save_model(tmp_path / "model", tokenizer=True, num_hidden_layers=1)
    sizes = ["--drafter", "none", "--dtype", "float32", "--max-seq-len", "64"]
    command = [sys.executable, "-c", RUN, "build", str(model), "-o", str(tmp_path / "engine")]
    done = subprocess.run(
        [*command, "--backend", backend, *sizes], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) > 4 and all(re.match(r"specstep: +\d+:\d\d ", line) for line in lines), done.stderr
