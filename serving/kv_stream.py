"""Events of a prefix cache as server-sent events, in the shapes that vLLM gives them: BlockStored, BlockRemoved,
AllBlocksCleared, in batches.

A reader keeps no memory here but its place in the log. One that is new, or has fallen behind it, is told that all is
cleared, and then of all blocks that are kept.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from ..errors import EngineError
from ..runtime.kv_events import Batch, KeptBlock, KVEvents
from ..runtime.prefix_cache import BLOCK
from .answering import HEADERS, event
from .connection import ENDLESS
from .served import Served

INTERVAL = 0.05  # seconds from one look at the log to the next: nobody has to wake a reader
AT_REST = 15.0  # seconds after which a stream says that it is still there, for proxies
PIECE = 64  # blocks of a snapshot in one event
CLEARED = {"type": "AllBlocksCleared"}
PLACES = {"cuda": "GPU", "cpu": "CPU"}  # of a cache, by the engine's device, as vLLM calls a medium


class KVEventStream(Response):
    """The events of one model, without an end: until the client goes, the engine is closed, or the server drains."""

    def __init__(self, served: Served, events: KVEvents, last: str | None):
        """last: the id of the last event that the reader has, None for one who is new."""
        self._served, self._events = served, events
        self._number = _place(events, last)
        self._medium = PLACES[served.engine.spec.device]
        super().__init__(None, 200, HEADERS, "text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"][ENDLESS] = True
        headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        gone = asyncio.ensure_future(_gone(receive))
        try:
            async for told in self._told(gone):
                await send({"type": "http.response.body", "body": told, "more_body": True})
        finally:
            gone.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _told(self, gone: asyncio.Future[None]) -> AsyncIterator[bytes]:
        """One event after the other until the reader is gone or the engine ends."""
        spoke = time.monotonic()
        while not gone.done():
            for told in self._new():
                spoke = time.monotonic()
                yield told
            if time.monotonic() - spoke > AT_REST:
                spoke = time.monotonic()
                yield b": still here\n\n"
            try:
                self._served.check()
            except EngineError:
                return
            await asyncio.wait([gone], timeout=INTERVAL)

    def _new(self) -> Iterator[bytes]:
        """What the reader does not have yet."""
        batches = None if self._number is None else self._events.since(self._number)
        if batches is None:
            self._number, kept = self._events.snapshot()
            yield from self._all(self._number, kept)
            return
        for batch in batches:
            self._number = batch.number
            yield self._event(batch.time, [*self._removed(batch), *self._stored(batch.stored)], batch.number)

    def _all(self, number: int, kept: list[KeptBlock]) -> Iterator[bytes]:
        """All that is kept. Only the last event has an id: a reader who is cut off ahead of it begins anew."""
        now, told = time.time(), [CLEARED]
        for start in range(0, max(len(kept), 1), PIECE):
            last = start + PIECE >= len(kept)
            yield self._event(now, [*told, *self._stored(kept[start : start + PIECE])], number if last else None)
            told = []

    def _event(self, when: float, events: list[Any], number: int | None = None) -> bytes:
        """A batch. number: up to which one the reader has all then."""
        head = b"" if number is None else f"id: {self._events.run}-{number}\n".encode()
        return head + event({"ts": when, "events": events})

    def _removed(self, batch: Batch) -> Iterator[dict[str, Any]]:
        if batch.removed:
            yield {"type": "BlockRemoved", "block_hashes": batch.removed, "medium": self._medium}

    def _stored(self, blocks: Iterable[KeptBlock]) -> Iterator[dict[str, Any]]:
        """An event for each run of blocks of which each follows the one before."""
        run: list[KeptBlock] = []
        for block in blocks:
            if run and block.parent != run[-1].hash:
                yield self._stored_run(run)
                run = []
            run.append(block)
        if run:
            yield self._stored_run(run)

    def _stored_run(self, run: list[KeptBlock]) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            "block_hashes": [block.hash for block in run],
            "parent_block_hash": run[0].parent,
            "token_ids": [token for block in run for token in block.tokens],
            "block_size": BLOCK,
            "lora_id": None,
            "medium": self._medium,
            "lora_name": None,
        }


def _place(events: KVEvents, last: str | None) -> int | None:
    """The number of the last batch that a reader has; None where that says nothing of this log."""
    known = re.fullmatch(rf"{events.run}-(\d{{1,18}})", last or "")
    return int(known[1]) if known else None


async def _gone(receive: Receive) -> None:
    """Returns when the client goes away."""
    with contextlib.suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass
