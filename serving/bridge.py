"""From the engine's thread to coroutines: the answers of one call, read without a thread for each."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from ..runtime.engine import Engine
from ..runtime.request import Request
from ..runtime.stream import Piece, Pieces


class Grown(NamedTuple):
    """A choice of a call that has grown: which one, its request, and what a step added."""

    choice: int
    request: Request
    piece: Piece


class Answer:
    """The choices of one call on their way, submitted together. Belongs to the event loop that made it."""

    def __init__(self, engine: Engine, requests: Sequence[Request]):
        """Submits the requests. Raises EngineError where the engine is closed."""
        self.requests = requests
        self._loop = asyncio.get_running_loop()
        self._told, self._waking = asyncio.Event(), False
        self._places = {id(request): index for index, request in enumerate(requests)}
        self._pieces = [Pieces(request, engine.text) for request in requests]
        self._submission = engine.run(requests)
        self._submission.listen(self._wake)

    def cancel(self) -> None:
        """End all choices: their rows are free when the step under way is done."""
        self._submission.cancel()
        self._told.set()

    async def read(self) -> AsyncIterator[Grown]:
        """What the choices grow by, until all have ended or are cancelled. Raises what the engine raised."""
        while True:
            self._told.clear()
            while True:
                try:
                    told = self._submission.poll()
                except StopIteration:
                    return
                if told is None:
                    break
                request, tokens = told
                index = self._places[id(request)]
                yield Grown(index, request, self._pieces[index].take(tokens))
            await self._told.wait()

    def _wake(self) -> None:
        """Called by the engine's thread: one call into the loop is under way at a time."""
        if not self._waking:
            self._waking = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._woken)

    def _woken(self) -> None:
        self._waking = False
        self._told.set()
