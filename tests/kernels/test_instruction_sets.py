"""Our C++ kernels for each instruction set of this machine: each a library of its own, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from specstep.kernels.native import INSTRUCTION_SETS, build_library, detect_instruction_set, supported_instruction_sets

HERE, OWN = Path(__file__).parent, detect_instruction_set()


@pytest.mark.parametrize(
    # a library compiles for long
    "name",
    [pytest.param(name, marks=() if name == OWN else pytest.mark.slow) for name in INSTRUCTION_SETS],
)
def test_every_instruction_set_of_this_machine(name: str) -> None:
    if name not in supported_instruction_sets():
        pytest.skip(f"needs {name}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "helpers"), *sys.path])}
    command = [sys.executable, str(HERE / "check_library.py"), str(build_library(instruction_set=name)), name]
    subprocess.run(command, env=environment, check=True)
