"""The processes of an engine's further ranks: their start, what goes to them, and their end.

A rank gets calls of its session's methods through a socket of its own, and answers twice: when it is loaded, and when
it has joined the others. It ends when the socket does, so none is left behind by a process that is killed.
"""

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from ...errors import EngineError
from ...kernels.nccl import NcclCommunicator
from .arithmetic import Arithmetic
from .places import Place

PATIENCE = 5.0  # seconds that a process has to end by itself
MOMENT = 1.0  # seconds in which one that was killed has ended
LOOK = 0.1  # seconds between two looks whether all run


@dataclass(frozen=True)
class RankStart:
    """What the process of a further rank is told first."""

    directory: Path
    digest: str  # of the manifest that the first rank's process read
    rank: int
    ranks: int
    place: Place
    parent: int  # the first rank's process
    threads: int  # that it computes with
    arithmetic: Arithmetic


class RankProcess:
    """One further rank."""

    def __init__(self, start: RankStart):
        """Start it. Raises EngineError where it ends at once."""
        self.rank, self.ranks = start.rank, start.ranks
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        with theirs:
            command = [sys.executable, "-P", "-m", f"{__package__}.follower", str(theirs.fileno())]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
            self._process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[*start.place.files, theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,  # no Ctrl-C is for it: its engine may go on
            )
        try:
            self._connection.send(start)
        except OSError:
            raise self.ended() from None

    @property
    def process(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether its process runs no more."""
        return self._process.poll() is not None

    def wait_for_answer(self) -> None:
        """Wait until it has loaded, or joined the others. Raises EngineError where it does not."""
        try:
            told = self._connection.recv()
        except (EOFError, OSError):
            raise self.ended() from None
        if told is not None:
            raise EngineError(str(told))

    def send(self, calls: Sequence[bytes]) -> None:
        """Have it make calls, pickled ones, in their order. Raises EngineError where it has ended."""
        try:
            self._connection.send_bytes(pickle.dumps(list(calls)))
        except OSError:
            raise self.ended() from None

    def ended(self) -> EngineError:
        """What to say of a rank that has ended."""
        status: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(MOMENT)
        how = "no longer answers" if status is None else "has ended"
        if status is not None and status < 0:
            how = f"was killed by signal {-status}"
        return EngineError(
            f"ranks: expected {self.ranks} running ranks, got rank {self.rank} (process {self.process}), which {how}; "
            "load the engine again"
        )

    def close(self) -> None:
        """Let it end."""
        self._connection.close()


def ended_first(processes: Sequence[RankProcess]) -> RankProcess | None:
    """One that runs no more; None where there is none within a moment: one that was killed takes some time to end."""
    until = time.monotonic() + MOMENT
    while True:
        for each in processes:
            if each.has_ended:
                return each
        if time.monotonic() > until:
            return None
        time.sleep(0.01)


def leave_when_one_ends(processes: Sequence[RankProcess], communicator: NcclCommunicator) -> None:
    """Have this process's rank leave once one of the others has ended: on a GPU, what waits for that one never ends."""
    while communicator.joined and not any(each.has_ended for each in processes):
        time.sleep(LOOK)
    communicator.leave()


def close_all(processes: Sequence[RankProcess]) -> None:
    """End processes of this process; those of another one, which forked this, are left alone."""
    for each in processes:
        each.close()
    until = time.monotonic() + PATIENCE
    for each in processes:
        try:
            each._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            each._process.kill()
            each._process.wait()
