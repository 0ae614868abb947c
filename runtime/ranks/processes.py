"""The processes of an engine's further ranks: their start, what goes to them, and their end.

A rank gets calls of its session's methods through a socket of its own, and answers once, when it is loaded. It ends
when the socket does, so none is left behind by a process that is killed.
"""

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from ...errors import EngineError

PATIENCE = 5.0  # seconds that a process has to end by itself
MOMENT = 1.0  # seconds in which one that was killed has ended
RankCall = tuple[str, tuple[object, ...]]  # a method, and its arguments


class RankProcess:
    """One further rank."""

    def __init__(
        self,
        directory: Path,
        digest: str,
        rank: int,
        ranks: int,
        memory: int,
        threads: int,
        flush: bool,
        cores: Collection[int],
    ):
        """Start it. digest: of the manifest that this process read; memory: what `make_shared_memory` gave; threads:
        that it computes with; flush: whether they flush denormals to zero, as all ranks must, to have the same bits;
        cores: that they run on, none: on any."""
        self.rank, self.ranks = rank, ranks
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        with theirs:
            given = [str(directory), digest, rank, ranks, memory, theirs.fileno(), os.getpid(), threads, int(flush)]
            given.append(",".join(map(str, sorted(cores))))
            command = [sys.executable, "-P", "-m", f"{__package__}.follower", *map(str, given)]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
            self._process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[memory, theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,  # no Ctrl-C is for it: its engine may go on
            )

    @property
    def process(self) -> int:
        """Its number."""
        return self._process.pid

    def wait_until_loaded(self) -> None:
        """Raises EngineError where it does not load."""
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
            if each._process.poll() is not None:
                return each
        if time.monotonic() > until:
            return None
        time.sleep(0.01)


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
