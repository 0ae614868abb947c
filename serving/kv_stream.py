"""Events of a prefix cache as server-sent events."""

import asyncio
import re
import time
from collections.abc import AsyncIterator

from fastapi import Response
from starlette.types import Receive, Scope, Send

from ..errors import EngineError
from ..runtime.kv_events import KVEvents
from .answering import HEADERS, event
from .connection import ENDLESS
from .kv_batches import INTERVAL, EventBatch, Follower
from .served import Served

AT_REST = 15.0  # seconds after which a stream says that it is still there, for proxies


class KVEventStream(Response):
    """The events of one model, without an end: until the client goes, the engine is closed, or the server drains."""

    def __init__(self, served: Served, log: KVEvents, last: str | None):
        """last: the id of the last event that the reader has, None for one who is new."""
        self._served, self._run = served, log.run
        known = re.fullmatch(rf"{log.run}-(\d{{1,18}})", last or "")  # others are of another server's run
        self._follower = Follower(log, int(known[1]) if known else None)
        super().__init__(None, 200, HEADERS, "text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"][ENDLESS] = True
        headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        gone = asyncio.ensure_future(_gone(receive))
        try:
            async for told in self._events(gone):
                await send({"type": "http.response.body", "body": told, "more_body": True})
        finally:
            gone.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, gone: asyncio.Future[None]) -> AsyncIterator[bytes]:
        """One event after the other until the reader is gone or the engine ends."""
        spoke = time.monotonic()
        while not gone.done():
            for told in self._follower.new():
                spoke = time.monotonic()
                yield self._event(told)
            if time.monotonic() - spoke > AT_REST:
                spoke = time.monotonic()
                yield b": still here\n\n"
            try:
                self._served.check()
            except EngineError:
                return
            await asyncio.wait([gone], timeout=INTERVAL)

    def _event(self, told: EventBatch) -> bytes:
        head = b"" if told.number is None else f"id: {self._run}-{told.number}\n".encode()
        return head + event({"ts": told.time, "events": told.events})


async def _gone(receive: Receive) -> None:
    """Returns when the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass
