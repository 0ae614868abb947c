"""What the process of a further rank runs: `python -m specstep.runtime.ranks.follower`, started by `processes`."""

import contextlib
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from ...errors import EngineError, SpecstepError, one_line
from ...kernels.communicator import Communicator
from ..engine_file import REBUILD, manifest_digest, read_manifest
from ..inductor.aoti import load_libraries, open_programs
from ..inductor.torch_session import TorchSession
from .cores import stay_on

LOOK = 1.0  # seconds between two looks whether the first rank's process is there


def main(
    directory: str,
    digest: str,
    rank: str,
    ranks: str,
    memory: str,
    place: str,
    parent: str,
    threads: str,
    flush: str,
    cores: str,
) -> int:
    """Load the rank, say so, and make the calls that come until the connection ends -> the exit status."""
    stay_on([int(core) for core in cores.split(",") if core])  # ahead of all threads
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(place))
    torch.set_num_threads(int(threads))
    torch.set_flush_denormal(flush == "1")
    with contextlib.closing(connection):
        try:
            session = _open(Path(directory), digest, int(rank), int(ranks))
            communicator = Communicator(int(memory), int(rank), int(ranks))
            os.close(int(memory))
        except (SpecstepError, OSError, RuntimeError) as error:
            connection.send(one_line(error))
            return 1
        connection.send(None)
        with communicator.bound():
            while _is_asked(connection, int(parent)):
                try:
                    calls = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    return 0
                try:
                    for name, arguments in map(pickle.loads, calls):
                        getattr(session, name)(*arguments)
                except RuntimeError:  # another rank has ended, most likely: this one's end tells the others
                    return 1
    return 0


def _open(directory: Path, digest: str, rank: int, ranks: int) -> TorchSession:
    """The rank's session. Raises EngineError."""
    manifest = read_manifest(directory)
    if manifest_digest(directory) != digest or manifest.spec.ranks != ranks:
        raise EngineError(f"{directory}: expected one engine for all ranks, got another one since; load it again")
    if not 0 < rank < ranks:
        raise EngineError(f"rank: expected 1 to {ranks - 1}, got {rank}; {REBUILD}")
    load_libraries(directory, manifest)
    return TorchSession(manifest.spec, *open_programs(directory, manifest.spec, rank))


def _is_asked(connection: Connection, parent: int) -> bool:
    """Wait for calls -> whether any came; where not, the process that would send them is gone: another may have been
    left with its end of the connection."""
    while not connection.poll(LOOK):
        if os.getppid() != parent:
            return False
    return True


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))
