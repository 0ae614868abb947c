"""What the process of a further rank runs: `python -m specstep.runtime.ranks.follower`, started by `processes`."""

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from ...errors import EngineError, one_line
from ..engine_file import REBUILD, manifest_digest, read_manifest
from ..inductor.aoti import check_memory, load_libraries, open_programs
from ..inductor.torch_session import TorchSession
from .arithmetic import compute_with
from .processes import RankStart

LOOK = 1.0  # seconds between two looks whether the first rank's process is there


def main(file: str) -> int:
    """Load the rank, join the others, say so, and make the calls that come until the connection ends -> the exit
    status. file: the descriptor of the connection, from which the rank's `RankStart` comes first."""
    connection = Connection(int(file))
    start = connection.recv()
    with contextlib.closing(connection):
        try:
            start.place.enter()  # ahead of all threads
            threading.Thread(target=_end_with, args=(start.parent,), daemon=True).start()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            torch.set_num_threads(start.threads)
            compute_with(start.arithmetic)
            session = _open(start)
            connection.send(None)
            communicator = start.place.join(start.rank, start.ranks)
            for file_of_place in start.place.files:
                os.close(file_of_place)
            connection.send(None)
        except Exception as error:
            with contextlib.suppress(OSError):  # the first rank has ended
                connection.send(one_line(error))
            return 1
        try:
            with communicator.bound():
                follow(connection, session)
        except Exception as error:  # its end tells the others
            if communicator.failure or not isinstance(error, RuntimeError):
                print(f"specstep: rank {start.rank}: {communicator.failure or one_line(error)}", file=sys.stderr)
            return 1
    return 0


def follow(connection: Connection, session: TorchSession) -> None:
    """Make the calls that come, until the connection ends. A step that is begun is waited for once the next one
    is, as the first rank does."""
    begun: list[Callable[[], object]] = []
    while True:
        try:
            calls = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        for name, arguments in map(pickle.loads, calls):
            got = getattr(session, name)(*arguments)
            if name == "begin_replay":
                begun.append(got)
            while len(begun) > 1:
                begun.pop(0)()


def _open(start: RankStart) -> TorchSession:
    """The rank's session. Raises EngineError."""
    manifest = read_manifest(start.directory)
    if manifest_digest(start.directory) != start.digest or manifest.spec.ranks != start.ranks:
        raise EngineError(f"{start.directory}: expected one engine for all ranks, got another one since; load it again")
    if not 0 < start.rank < start.ranks:
        raise EngineError(f"rank: expected 1 to {start.ranks - 1}, got {start.rank}; {REBUILD}")
    if manifest.spec.device == "cuda":
        check_memory(manifest, start.rank)
    load_libraries(start.directory, manifest)
    return TorchSession(manifest.spec, *open_programs(start.directory, manifest.spec, start.rank))


def _end_with(parent: int) -> None:
    """End this process, whatever it waits for, once the one that started it is gone: another may have been left with
    its end of the connection."""
    while os.getppid() == parent:
        time.sleep(LOOK)
    os._exit(1)


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))
