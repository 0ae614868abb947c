"""Ranks that NCCL joins, over a library that has its functions for threads and the host's memory."""

import ctypes
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from specstep.kernels import nccl
from specstep.kernels.gather_ranks.op import gather_ranks
from specstep.kernels.gather_ranks.reference import gather_ranks as reference
from specstep.kernels.nccl import NcclCommunicator, make_unique_id

STREAM = 0x7000_0000_1230  # of 64 bits


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    """The library."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("nccl") / "libfakenccl.so"
    source = Path(__file__).parents[1] / "helpers" / "fake_nccl.c"
    command = [compiler, "-shared", "-fPIC", "-pthread", "-Wall", "-Wno-unused-parameter", "-Werror"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    return library


@pytest.fixture(autouse=True)
def streams(fake, monkeypatch):
    """The current stream of a GPU that is not there -> how often it was waited for."""
    waits = []
    stream = SimpleNamespace(cuda_stream=STREAM, synchronize=lambda: waits.append(1))
    monkeypatch.setattr(nccl, "LIBRARY", str(fake))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return waits


@pytest.fixture
def number(fake):
    """`number(name)`: a variable of the library."""
    return lambda name: ctypes.c_int.in_dll(ctypes.CDLL(str(fake)), name)


def on_threads(ranks, run):
    """`run(communicator)` of each rank, in a thread of its own."""
    unique_id = make_unique_id()

    def one(rank):
        communicator = NcclCommunicator(unique_id, rank, ranks)
        with communicator.bound():
            return run(communicator)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_gather_what_all_have(ranks, fake):
    parts = [torch.randn(5, 7).bfloat16().t() + rank for rank in range(ranks)]

    def run(communicator):
        given = parts[communicator.rank]
        return [gather_ranks(given + turn, ranks) for turn in range(50)]

    for got in on_threads(ranks, run):
        assert all(torch.equal(each, reference([part + turn for part in parts])) for turn, each in enumerate(got))
    assert ctypes.c_void_p.in_dll(ctypes.CDLL(str(fake)), "last_stream").value == STREAM


def until(holds):
    while not holds():
        time.sleep(0.001)


def test_the_host_waits_for_the_gpu_from_time_to_time_but_not_in_a_graph(streams, monkeypatch):
    """Else the GPU's queue could fill up behind a rank that is gone."""

    def run(communicator):
        for _ in range(2 * nccl.AHEAD + 1):
            gather_ranks(torch.ones(1), 2)

    on_threads(2, run)
    assert len(streams) == 4
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    on_threads(2, run)
    assert len(streams) == 4


def test_leaving_does_not_wait_for_the_graphs_of_a_rank(number):
    number("graphs").value = 1

    def run(communicator):
        communicator.leave()
        assert not communicator.joined
        with pytest.raises(RuntimeError, match="this rank has left"):
            gather_ranks(torch.ones(3), 1)

    on_threads(1, run)
    freed = (ctypes.c_int * 2).in_dll(ctypes.CDLL(nccl.LIBRARY), "group")
    assert freed[1] == 0
    number("graphs").value = 0
    until(lambda: freed[1] == 1)


def test_a_rank_that_waits_is_freed_when_it_leaves(number, monkeypatch):
    monkeypatch.setattr(nccl, "PATIENCE", 0.01)  # for what it gathers

    def leave(communicator):
        until(lambda: number("arrived").value)
        communicator.leave()

    def run(communicator):
        assert communicator.joined
        if communicator.rank == 1:
            return None
        threading.Thread(target=leave, args=(communicator,)).start()
        with pytest.raises(RuntimeError, match="ncclAllGather: system error: a rank is gone"):
            gather_ranks(torch.ones(3), 2)
        assert not communicator.joined
        with pytest.raises(RuntimeError, match="this rank has left"):
            gather_ranks(torch.ones(3), 2)
        communicator.leave()  # again
        return True

    assert on_threads(2, run) == [True, None]


def test_what_nccl_refuses_is_said():
    with pytest.raises(OSError, match="ncclCommInitRank: invalid argument: a rank is gone"):
        NcclCommunicator(make_unique_id(), 2, 2)
    with pytest.raises(OSError, match="ncclCommInitRank: invalid argument"):
        NcclCommunicator(bytes(128), 0, 1)


def test_a_machine_without_nccl_is_told(monkeypatch):
    monkeypatch.setattr(nccl, "LIBRARY", "libnccl-that-is-not-there.so")
    with pytest.raises(OSError, match="libnccl-that-is-not-there"):
        make_unique_id()
