"""Ranks that are processes: what they exchange, and how one notices that another has ended."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from specstep.compile.inductor.programs import compile_programs
from specstep.kernels.all_reduce.op import all_reduce
from specstep.kernels.all_reduce.reference import all_reduce as sum_in_order
from specstep.kernels.communicator import Communicator, make_shared_memory
from specstep.kernels.native import build_library, load_library
from torch import Tensor, nn
from torch.export import Dim

RANK = """
import sys, time, torch
from pathlib import Path
from specstep.kernels.all_reduce.op import all_reduce
from specstep.kernels.communicator import Communicator
from specstep.kernels.native import load_library

file, rank, turns = map(int, sys.argv[1:4])
load_library(Path(sys.argv[4]))
communicator = Communicator(file, rank, 2)
with communicator.bound():
    for turn in range(turns):
        assert all_reduce(torch.tensor([float(turn)]), 2).item() == 2 * turn
print("done", flush=True)
if sys.argv[5] == "leave":
    communicator.leave()
time.sleep(60)
"""


@pytest.fixture
def start():
    """`start(turns, then)`: rank 0 here, and rank 1 as a process."""
    load_library()
    started, joined = [], []

    def run(turns, then="stay"):
        file = make_shared_memory(2)
        command = [sys.executable, "-c", RANK, str(file), "1", str(turns), str(build_library()), then]
        started.append(subprocess.Popen(command, pass_fds=[file], stdout=subprocess.PIPE, text=True))
        joined.append(Communicator(file, 0, 2))
        os.close(file)
        return joined[-1], started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()
    for communicator in joined:
        communicator.leave()


def turns_of(communicator, turns):
    with communicator.bound():
        return [all_reduce(torch.tensor([float(turn)]), 2).item() for turn in turns]


def test_processes_exchange_and_leave_no_segment(start):
    before = set(os.listdir("/dev/shm"))
    communicator, process = start(50)
    assert turns_of(communicator, range(50)) == [2.0 * turn for turn in range(50)]
    assert process.stdout.readline() == "done\n"
    assert set(os.listdir("/dev/shm")) == before


@pytest.mark.parametrize("end", ["killed", "left"])
def test_a_rank_that_ends_is_noticed(start, end):
    communicator, process = start(3, "leave" if end == "left" else "stay")
    assert turns_of(communicator, range(3)) == [0, 2, 4]
    assert process.stdout.readline() == "done\n"
    if end == "killed":
        os.kill(process.pid, signal.SIGKILL)  # nobody waits for it: it stays in the system's table
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        turns_of(communicator, range(3, 4))


def test_communicators_of_one_process_are_apart(start):
    (first, _), (second, _) = start(4), start(2)
    assert turns_of(first, range(2)) == turns_of(second, range(2)) == [0, 2]
    assert turns_of(first, range(2, 4)) == [4, 6]


def test_memory_that_cannot_be_mapped_is_refused(tmp_path):
    load_library()
    (tmp_path / "file").write_bytes(b"")
    with open(tmp_path / "file", "rb") as file, pytest.raises(OSError, match="rank 1 of 2 cannot map"):
        Communicator(file.fileno(), 1, 2)
    with pytest.raises(OSError, match="rank 2 of 2 cannot map"):
        Communicator(0, 2, 2)


class Network(nn.Module):
    """Takes its part of a sum, and puts what comes of it beside what others have."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.ops.specstep.all_reduce(x * 2, 2)
        return torch.ops.specstep.all_gather(total + x, 2)


COMPILED = """
import sys, torch
from pathlib import Path
from specstep.kernels.communicator import Communicator
from specstep.kernels.native import load_library

load_library(Path(sys.argv[3]))
program = torch._C._aoti.AOTIModelPackageLoader(sys.argv[2], "model", True, 1, -1)
communicator, x = Communicator(int(sys.argv[1]), 1, 2), torch.arange(12.0).view(3, 4) / 7
with communicator.bound():
    print(program.run([x])[0].tolist(), flush=True)
"""


def test_compiled_models_exchange(tmp_path):
    """The runtime holds Python's lock while one runs, so that ranks are processes."""
    rows = ({0: Dim("rows", min=1, max=64)},)
    exported = torch.export.export(Network(), (torch.ones(5, 4),), dynamic_shapes=rows, strict=False)
    compile_programs({"step": exported}, tmp_path, "cpu")
    file, package = make_shared_memory(2), str(tmp_path / "step.pt2")
    command = [sys.executable, "-c", COMPILED, str(file), package, str(build_library())]
    with subprocess.Popen(command, pass_fds=[file], stdout=subprocess.PIPE, text=True) as process:
        communicator = Communicator(file, 0, 2)
        program = torch._C._aoti.AOTIModelPackageLoader(package, "model", True, 1, -1)
        x, other = torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4) / 7
        with communicator.bound():
            (got,) = program.run([x])
        total = sum_in_order([x * 2, other * 2])
        assert torch.equal(got, torch.cat([total + x, total + other], 1))
        assert json.loads(process.stdout.readline()) == got.tolist()
        communicator.leave()
    os.close(file)
