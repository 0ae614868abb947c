"""Triton Inference Server without one: what its Python backend gives a model, and a model that is asked."""

import asyncio
import os
import socket
import threading
from multiprocessing import Pipe
from types import SimpleNamespace

import numpy as np
from served import PATIENCE
from specstep.serving.served import Served
from specstep.serving.triton.model import TritonModel
from specstep.serving.triton.worker import serve


class Sender:
    """The sender of one request: what was sent, and whether the client has gone away."""

    def __init__(self):
        self.sent, self.cancelled, self.final = [], False, threading.Event()

    def is_cancelled(self):
        return self.cancelled

    def send(self, response=None, flags=0):
        assert not self.final.is_set()
        if response is not None:
            self.sent.append(response)
        if flags:
            self.final.set()

    def done(self):
        """All responses, the error last."""
        assert self.final.wait(PATIENCE)
        return self.sent


class Fault:
    """An error of Triton."""

    CANCELLED, UNAVAILABLE, INVALID_ARG, INTERNAL = "cancelled", "unavailable", "invalid", "internal"

    def __init__(self, message, code):
        self.message, self.code = message, code


def response(tensors, error=None):
    return SimpleNamespace(error=error, outputs=dict(tensors))


LOGGED = []
UTILS = SimpleNamespace(
    Logger=SimpleNamespace(log_warn=LOGGED.append, log_error=LOGGED.append),
    Tensor=lambda name, values: (name, values),
    InferenceResponse=response,
    TritonError=Fault,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
    get_input_tensor_by_name=lambda request, name: request.inputs.get(name),
)


def array(value):
    if isinstance(value, str):
        return np.array([value.encode()], dtype=object)
    return np.array([value] if not isinstance(value, list) else value, bool if isinstance(value, bool) else np.int32)


class InAThread:
    """The process of an engine, without one."""

    def __init__(self, make, max_queue, tool_format=None):
        self.connection, self._theirs = Pipe()
        self._thread = threading.Thread(target=self._run, args=(make, max_queue, tool_format), daemon=True)
        self._thread.start()

    def _run(self, make, max_queue, tool_format):
        asyncio.run(serve(self._theirs, lambda: Served("engine", make(), max_queue, True, tool_format)))
        self.die()

    def die(self):
        with socket.socket(fileno=os.dup(self._theirs.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.connection.close()
        self._thread.join(PATIENCE)
        return -9


def started(make, max_queue, tool_format=None):
    """A model, and the list of its processes."""
    made, begun = TritonModel(), []

    def begin():
        begun.append(InAThread(make, max_queue, tool_format))
        return begun[-1]

    made.utils = UTILS
    made.start(begin)
    return made, begun


def ask(model, **inputs):
    sender = Sender()
    tensors = {name: SimpleNamespace(as_numpy=lambda value=value: array(value)) for name, value in inputs.items()}
    model.execute([SimpleNamespace(inputs=tensors, get_response_sender=lambda: sender)])
    return sender


def tokens_of(sent, choice=0):
    told = [one.outputs for one in sent if one.outputs["choice"] == [choice]]
    return [token for outputs in told for token in outputs["token_ids"].tolist()]
