"""A connection that a client cannot fill, nor hold for ever: what is sent ahead of a body, and how long all may take.

httptools, which parses, keeps whatever comes; uvicorn has no deadline but that of a connection at rest.
"""

import asyncio
import contextlib
import json
import logging
import socket
import struct
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from .api_error import BUSY, INVALID, error_body
from .options import ServeOptions

logger = logging.getLogger(__name__)
LONGEST_HEAD = 2**16  # bytes of a URL and headers, or of trailers
HEADER = 32  # bytes that each header counts beside its own, for what it takes in memory
ENDLESS = "endless"  # in the state of a call that ends with its connection
MOST_PIPELINED = 8  # requests of a connection that wait for the one ahead of them
MOST_IGNORED = 2**20  # bytes that a client which is refused may still send
LINGER = 1.0  # seconds in which a client that is refused may read why
REFUSED = {
    400: "expected HTTP, got what does not parse",
    408: "expected all headers of a request in time",
    414: f"expected a URL of at most {LONGEST_HEAD} bytes",
    431: f"expected headers of at most {LONGEST_HEAD} bytes",
    503: "there are as many connections as there may be; try again later",
}


class Connection(HttpToolsProtocol):
    """uvicorn's, with bounds. Between two callbacks of the parser it is given at most LONGEST_HEAD bytes."""

    def __init__(self, options: ServeOptions, **given: Any):
        super().__init__(**given)
        self._options = options
        self._head = self._unseen = 0  # bytes of the head under way; those since a head ended or a body grew
        self._refused = 0  # a status of REFUSED
        self._answering: RequestResponseCycle | None = None  # the call under way; `cycle` is the last one that came
        self._reading: asyncio.TimerHandle | None = None  # until when a head has to be there
        self._writing: asyncio.TimerHandle | None = None  # until when a client has to have read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._options.max_connections:
            self._refuse(503)
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._unseen += len(data)
            if self._unseen > MOST_IGNORED:
                self.transport.abort()
            return
        if self._reading is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()
        self._unseen += len(data)
        super().data_received(data)
        if not self._refused and (self._unseen > LONGEST_HEAD or len(self.pipeline) > MOST_PIPELINED):
            self._refuse(431)

    def on_message_begin(self) -> None:
        self._head = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url), 414)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + HEADER, 431)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unseen = 0
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unseen = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unseen = 0
        self._stop_waiting()
        super().on_message_complete()
        if self.cycle.response_complete:  # whose time at rest ended with the rest of its body
            self._await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._await_reader()
        elif self.cycle.response_complete and self.cycle.more_body:  # a body that nobody reads any more
            self._await_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def shutdown(self) -> None:
        super().shutdown()
        if self.cycle is not None and self.cycle.scope["state"].get(ENDLESS):
            self.transport.close()
        if self.transport.is_closing():
            self._await_reader()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._await_reader()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refused or 400)

    def _count(self, size: int, status: int) -> None:
        """Count bytes of a head. Raises what ends the parser."""
        self._head += size
        if self._head > LONGEST_HEAD:
            self._refused = status
            raise httptools.HttpParserError(REFUSED[status])

    def _await_head(self) -> None:
        """Have all of a head come in time."""
        if self._reading is None:
            self._reading = self.loop.call_later(self._options.head_seconds, self._late)

    def _stop_waiting(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _late(self) -> None:
        self._refuse(408) if self._unseen else self.transport.abort()

    def _await_reader(self) -> None:
        """Have the client read what was written in time: a transport that is closed waits for it, too."""
        if self._writing is None:
            self._writing = self.loop.call_later(self._options.send_seconds, self._reset)

    def _reset(self) -> None:
        """End the connection now: the system, too, would wait for its client to read what is left."""
        told = self.transport.get_extra_info("socket")
        if told is not None and told.fileno() >= 0:
            same = socket.socket(fileno=told.fileno())  # no copy: there may be no descriptor left
            with contextlib.suppress(OSError):
                same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            same.detach()
        self.transport.abort()

    def _refuse(self, status: int) -> None:
        """Answer with a status, and read no more. A call under way is told that its client has gone."""
        self._refused = status
        self._stop_waiting()
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        logger.info("a connection was refused: %d", status)
        body = json.dumps(error_body(REFUSED[status], BUSY if status == 503 else INVALID)).encode()
        kind, length = b"content-type: application/json\r\n", b"content-length: %d\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + kind + length + b"connection: close\r\n\r\n" + body)
        self.loop.call_later(LINGER, self.transport.abort)  # at once, the client would see a reset ahead of the answer


def limited(options: ServeOptions) -> Callable[..., Connection]:
    """What uvicorn makes connections with."""
    return lambda **given: Connection(options, **given)
