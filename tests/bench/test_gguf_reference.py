"""Every architecture of GGUF says what llama.cpp says, where that is installed."""

import subprocess
import sys
from pathlib import Path

import pytest
from gguf_case import case_model, save_case
from gguf_cases import CASES

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import gguf_reference
from gguf_reference import DIFFERENT, Compared, compare, table
from side_by_side.engines import Skip
from side_by_side.peer_llama_cpp import binary

ERROR, STATES, ROUNDED = 2e-5, 3e-4, 3e-3
LOOK_UP = {"gemma", "gemma2", "gemma3", "starcoder2", "gpt2"}  # GELU, in llama.cpp a table of 16 bits

# Weights that are changed by half a unit in their last place change these logits by up to 6e-5.
LINEAR = {"qwen3next", "qwen3next of 2025", "qwen35", "qwen35moe"}


def test_the_table_says_why_a_file_differs_or_was_not_compared():
    lines = table({"llama": Compared(2e-6, 16), "mistral": Compared(0.5, 3), "x": "not read"}).splitlines()
    assert lines[2:] == [
        "| llama | 2e-06 | 16 of 16 |  |",
        "| mistral | 5e-01 | 3 of 16 | llama.cpp leaves out the window |",
        "| x |  |  | not read |",
    ]


@pytest.mark.parametrize("arguments", [["nothing"], ["llama.bin"]])
def test_an_unknown_name_ends_in_one_line(arguments, capsys):
    assert gguf_reference.main(arguments) == 2
    assert "name: expected a file, or one of " in capsys.readouterr().err


@pytest.fixture(scope="module")
def installed():
    try:
        subprocess.run([str(binary()), "--version"], capture_output=True, check=True)
    except (Skip, subprocess.CalledProcessError) as reason:
        pytest.skip(f"needs llama-server: make peers ({reason})")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in DIFFERENT])
def test_log_probabilities_are_those_of_llama_cpp(installed, tmp_path, name):
    compared = compare(save_case(tmp_path / "a.gguf", CASES[name], case_model(CASES[name])), 6)
    assert compared.error < (ROUNDED if name in LOOK_UP else STATES if name in LINEAR else ERROR)
    assert compared.same == 6 or name in LOOK_UP


@pytest.mark.slow
def test_a_window_that_llama_cpp_leaves_out_is_noticed(installed, tmp_path):
    case = CASES["mistral"]
    assert compare(save_case(tmp_path / "a.gguf", case, case_model(case)), 6).error > 0.1
