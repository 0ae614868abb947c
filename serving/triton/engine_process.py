"""The process of an engine, as a model in Triton sees it: what goes to it, what comes back, its start and its end."""

import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .tensors import Given

PATIENCE = 10  # seconds that a process has to end by itself

ToWorker = tuple[int, Given | None]  # a request by its number: its inputs, or None to end it


class End(NamedTuple):
    """The end of a request: the name of a status of Triton, None where all is well, and what to tell of it."""

    status: str | None = None
    reason: str = ""


FromWorker = tuple[int, Mapping[str, np.ndarray] | End]  # of a request by its number: the outputs of a step, or its end


class EngineProcess:
    """Runs worker.py. Over `connection` go `ToWorker` and `FromWorker`; ahead of these comes one message: None where
    the engine is loaded, why not otherwise. The process ends when the connection does: none is left behind by a server
    that is killed."""

    def __init__(self, engine: Path, max_queue: int, tool_format: str | None, environment: Mapping[str, str]):
        """tool_format: see `Served`. environment: the variables of the process."""
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        with theirs:
            place = theirs.fileno()
            told = [str(engine), str(max_queue), tool_format or "", str(place)]
            command = [sys.executable, "-P", "-m", f"{__package__}.worker", *told]
            self._process = subprocess.Popen(command, env=environment, pass_fds=[place], start_new_session=True)

    def close(self) -> int:
        """End the process -> its exit status, negative for the signal that killed it."""
        self.connection.close()
        try:
            return self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
