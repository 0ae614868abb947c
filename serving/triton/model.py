"""What the model.py of an exported repository runs: an engine for each instance, in-flight batching inside of it."""

import asyncio
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import EngineError, InputError
from ...runtime.engine import Engine, load
from ...runtime.request import Request
from ..bridge import Answer
from .tensors import INPUTS, Given, read, told

logger = logging.getLogger(__name__)
ENGINE = "engine"  # the engine's folder in that of a version
LOOK = 0.1  # seconds between looks at whether a client has gone away: each is a call into the server's process
NUMPY = "many Triton servers hand on empty outputs with numpy 2; if yours does, run `pip install 'numpy<2'`"
PATIENCE = 10  # seconds that `finalize` waits for answers to be told that they end


class QueueFullError(Exception):
    """As many answers wait as may."""


class CancelledError(Exception):
    """The client wants no more."""


class Model:
    """Base of the class TritonPythonModel. `execute` hands requests to the engine and returns: Triton then gives the
    next ones, and they join those that run. Everything else happens in the one thread of an event loop.

    utils: the module triton_python_backend_utils, which the server alone has.
    """

    utils: Any

    def initialize(self, arguments: dict[str, str]) -> None:
        """Called once. Raises EngineError, which the server logs as the reason why the model is not there."""
        if arguments["model_instance_kind"] == "GPU":  # before CUDA is first used
            os.environ["CUDA_VISIBLE_DEVICES"] = arguments["model_instance_device_id"]
        if int(np.__version__.split(".")[0]) > 1:  # nothing here can tell whether this server is one of them
            self.utils.Logger.log_warn(f"numpy {np.__version__}: {NUMPY}")
        parameters = json.loads(arguments["model_config"])["parameters"]
        engine = load(Path(arguments["model_repository"]) / arguments["model_version"] / ENGINE)
        self.start(engine, int(parameters["max_queue"]["string_value"]))

    def start(self, engine: Engine, max_queue: int) -> None:
        """Begin to take requests. max_queue: choices that may wait for a row."""
        self._engine, self._most, self._taken = engine, engine.spec.max_batch + max_queue, 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="specstep-triton", daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Called with each request as it comes."""
        for request in requests:
            tensors = {name: self.utils.get_input_tensor_by_name(request, name) for name in INPUTS}
            given = {name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None}
            self._loop.call_soon_threadsafe(self._begin, request.get_response_sender(), given)

    def finalize(self) -> None:
        """Called once, last. Answers that still run end with an error."""
        self._engine.close()
        asyncio.run_coroutine_threadsafe(self._ended(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _ended(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=PATIENCE)

    def _begin(self, sender: Any, given: Given) -> None:
        task = self._loop.create_task(self._answer(sender, given))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, sender: Any, given: Given) -> None:
        """One request from its inputs to its final flag."""
        try:
            await self._run(sender, given)
            error = None
        except Exception as raised:
            error = self._error(raised)
        response = [] if error is None else [self.utils.InferenceResponse([], error)]
        sender.send(*response, flags=self.utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def _run(self, sender: Any, given: Given) -> None:
        requests = await asyncio.to_thread(read, self._engine, given)
        if self._taken + len(requests) > self._most:
            raise QueueFullError
        self._taken += len(requests)
        answer = Answer(self._engine, requests)
        watch = asyncio.ensure_future(_watch(sender, answer))
        try:
            async for grown in answer.read():
                if not sender.is_cancelled():
                    sender.send(self._response(grown.choice, grown.request, grown.piece))
        finally:
            watch.cancel()
            answer.cancel()
            self._taken -= len(requests)
        if any(request.finish_reason == "cancelled" for request in requests):
            raise CancelledError if sender.is_cancelled() else EngineError("the model is being unloaded")

    def _response(self, choice: int, request: Request, piece: Any) -> Any:
        tensors = [self.utils.Tensor(name, values) for name, values in told(choice, request, piece).items()]
        return self.utils.InferenceResponse(tensors)

    def _error(self, error: Exception) -> Any:
        """What a client is told, with the status that it has in gRPC and HTTP."""
        kinds = self.utils.TritonError
        if isinstance(error, CancelledError):
            return kinds("the request was cancelled", kinds.CANCELLED)
        if isinstance(error, QueueFullError):
            return kinds(f"{self._taken} answers run or wait already; try again later", kinds.UNAVAILABLE)
        if isinstance(error, InputError):
            return kinds(str(error), kinds.INVALID_ARG)
        if isinstance(error, EngineError):
            return kinds("the model is not available", kinds.UNAVAILABLE)
        logger.error("a request failed", exc_info=error)
        return kinds("the model failed; its log says why", kinds.INTERNAL)


async def _watch(sender: Any, answer: Answer) -> None:
    """Free the rows of a client that went away."""
    while not sender.is_cancelled():
        await asyncio.sleep(LOOK)
    answer.cancel()
