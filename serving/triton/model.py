"""What the model.py of an exported repository runs: it stands between Triton and the process of an engine."""

import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import EngineError
from .engine_process import End, EngineProcess, FromWorker
from .tensors import INPUTS, Given

ENGINE = "engine"  # the engine's folder in that of a version
LOOK = 0.1  # seconds between looks at whether a client has gone away: each is a call into the server's process
PAUSE = 5  # seconds until a process that could not load its engine is followed by another
NUMPY = "many Triton servers hand on empty outputs with numpy 2; if yours does, run `pip install 'numpy<2'`"
LOST = End("UNAVAILABLE", "the engine's process has ended; another one is being started, so try again")
UNLOADED = End("UNAVAILABLE", "the model is being unloaded")
CANCELLED = End("CANCELLED", "the request was cancelled")


class TritonModel:
    """Base of the class TritonPythonModel. `execute` hands requests to the engine and returns: Triton then gives the
    next ones, and they join those that run.

    Triton starts no other process for a decoupled model whose own is killed, nor does it end that one's requests. So
    the engine, which has the memory and runs the kernels, has a process behind this one: when it dies, its requests end
    with UNAVAILABLE and another one is started.

    utils: the module triton_python_backend_utils, which the server alone has.
    """

    utils: Any

    def initialize(self, arguments: dict[str, str]) -> None:
        """Called once. Raises EngineError, which the server logs as the reason why the model is not there."""
        environment = dict(os.environ)
        if arguments["model_instance_kind"] == "GPU":
            environment["CUDA_VISIBLE_DEVICES"] = arguments["model_instance_device_id"]
        if int(np.__version__.split(".")[0]) > 1:  # nothing here can tell whether this server is one of them
            self.utils.Logger.log_warn(f"numpy {np.__version__}: {NUMPY}")
        given = json.loads(arguments["model_config"])["parameters"]
        max_queue = given["max_queue"]["string_value"]
        tool_format = given.get("tool_format", {}).get("string_value")  # earlier versions wrote none
        engine = Path(arguments["model_repository"]) / arguments["model_version"] / ENGINE
        self.start(lambda: EngineProcess(engine, int(max_queue), tool_format or None, environment))

    def start(self, begin: Callable[[], EngineProcess]) -> None:
        """Begin to take requests. Raises EngineError where the engine cannot be loaded."""
        self._begin, self._process, self._loaded = begin, begin(), True
        self._senders: dict[int, Any] = {}
        self._numbers, self._lock, self._ending = itertools.count(), threading.Lock(), threading.Event()
        try:
            fault = self._process.connection.recv()
        except (EOFError, OSError):
            fault = "the engine's process ended while it loaded the engine; the server's log says why"
        if fault is not None:
            self._process.close()
            raise EngineError(fault)
        self._thread = threading.Thread(target=self._relay, name="specstep-triton", daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Called with each request as it comes."""
        for request in requests:
            tensors = {name: self.utils.get_input_tensor_by_name(request, name) for name in INPUTS}
            given = {name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None}
            number = next(self._numbers)
            with self._lock:
                self._senders[number] = request.get_response_sender()
                self._send(number, given)

    def finalize(self) -> None:
        """Called once, last. Answers that still run end with an error."""
        self._ending.set()
        self._thread.join()
        self._end(list(self._senders), UNLOADED)
        self._process.close()

    def _send(self, number: int, given: Given | None) -> None:
        """To the process. The lock is held: one message at a time."""
        with contextlib.suppress(OSError):  # the process has died; `_relay` is about to see it, and ends the request
            self._process.connection.send((number, given))

    def _relay(self) -> None:
        """Pass on what the engine says, look after clients that go away, start another process after one that died."""
        looked, server = time.monotonic(), os.getppid()
        while not self._ending.is_set():
            try:
                if self._process.connection.poll(LOOK):
                    self._hear(self._process.connection.recv())
                if time.monotonic() - looked > LOOK:
                    looked = time.monotonic()
                    self._look()
            except Exception as error:  # without this thread requests would wait for ever: nothing may end it
                self._replace(error)
            if os.getppid() != server:  # killed, maybe with a lock for which Triton's code waits here for ever
                os._exit(1)

    def _hear(self, message: FromWorker | str | None) -> None:
        """One message of the process."""
        if not isinstance(message, tuple):  # the first one of another process
            self._loaded = message is None
            self.utils.Logger.log_warn(message or "the engine is loaded again")
            return
        number, told = message
        if isinstance(told, End):
            self._end([number], told)
        elif sender := self._senders.get(number):
            tensors = [self.utils.Tensor(name, values) for name, values in told.items()]
            self._respond(sender, self.utils.InferenceResponse(tensors))

    def _look(self) -> None:
        """Free the rows of clients that went away."""
        with self._lock:
            gone = [number for number, sender in self._senders.items() if sender.is_cancelled()]
            for number in gone:
                self._send(number, None)
        self._end(gone, CANCELLED)

    def _replace(self, error: Exception) -> None:
        """The process has ended, or cannot be heard, and its requests end. Those that come from now on wait for the
        next one."""
        if not self._loaded:
            self._ending.wait(PAUSE)
        heard = "" if isinstance(error, EOFError | OSError) else f" after {type(error).__name__}: {error}"
        with self._lock:
            lost = list(self._senders)
            self.utils.Logger.log_error(f"the engine's process ended with status {self._process.close()}{heard}")
            self._loaded = False
            with contextlib.suppress(Exception):  # no memory for one, perhaps: the next look at its connection is here
                self._process = self._begin()
        self._end(lost, LOST)

    def _end(self, numbers: Iterable[int], end: End) -> None:
        """The last response of requests, with its status."""
        kinds = self.utils.TritonError
        for number in numbers:
            with self._lock:
                sender = self._senders.pop(number, None)
            if sender is None:  # its client went away before
                continue
            error = [] if end.status is None else [kinds(end.reason, getattr(kinds, end.status))]
            response = [self.utils.InferenceResponse([], each) for each in error]
            self._respond(sender, *response, flags=self.utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _respond(self, sender: Any, *response: Any, flags: int = 0) -> None:
        try:
            sender.send(*response, flags=flags)
        except Exception as error:  # whatever Triton has against one response, the others go on
            self.utils.Logger.log_error(f"a response was not sent: {error}")
