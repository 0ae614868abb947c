"""From the engine's thread to coroutines: the answers of one call, read without a thread for each."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from ..report import TokenLogprobs
from ..runtime.asked.request import Request
from ..runtime.engine import Engine
from ..runtime.stream import Piece, Pieces
from ..runtime.text.tokenizer import EngineTokenizer


@dataclass
class Grown:
    """A choice of a call that has grown: which one, its request, and what each step added."""

    choice: int
    request: Request
    pieces: list[Piece]

    @property
    def text(self) -> str:
        """What the steps added to the text."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def token_ids(self) -> list[int]:
        """Their tokens."""
        return [token for piece in self.pieces for token in piece.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """The tokens' logprobs, where they were asked for."""
        return [each for piece in self.pieces for each in piece.logprobs]


class Answer:
    """The choices of one call on their way, submitted together. Belongs to the event loop that made it."""

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        ended: Callable[[int], None] = lambda count: None,
        text: EngineTokenizer | None = None,
    ):
        """Submits the requests. ended: called with how many choices have ended, whether or not anybody reads. text:
        what makes text of tokens, None for the engine's. Raises EngineError where the engine is closed."""
        self.requests, self._ended = requests, ended
        self._loop = asyncio.get_running_loop()
        self._told, self._waking, self._pausing = asyncio.Event(), False, False
        self._error: Exception | None = None
        self._grown: dict[int, Grown] = {}  # what came and was not read
        self._places = {id(request): index for index, request in enumerate(requests)}
        self._pieces = [Pieces(request, text or engine.text) for request in requests]
        self._submission = engine.run(requests)
        self._submission.listen(self._wake)

    def cancel(self) -> None:
        """End all choices: their rows are free when the step under way is done."""
        self._submission.cancel()
        self._told.set()

    async def read(self, interval: float = 0.0) -> AsyncIterator[list[Grown]]:
        """What the choices grew by, each at most once in a list, until all have ended or are cancelled. Raises what the
        engine raised.

        Args:
            interval: seconds in which there is one list, unless a choice ends.
        """
        while True:
            self._told.clear()
            more = self._take()
            ended = not more or any(each.request.finish_reason for each in self._grown.values())
            if self._grown and (ended or not self._pausing):
                grown, self._grown = self._grown, {}
                self._pause(interval)
                yield list(grown.values())
                continue  # more may have come
            if self._error is not None:
                raise self._error
            if not more:
                return
            await self._told.wait()

    def _take(self) -> bool:
        """Add what has come -> whether more may come."""
        try:
            while (told := self._submission.poll()) is not None:
                request, tokens = told
                choice = self._places[id(request)]
                one = self._grown.setdefault(choice, Grown(choice, request, []))
                one.pieces.append(self._pieces[choice].take(tokens))
                if request.finish_reason is not None:
                    self._ended(1)
        except StopIteration:
            return False
        except Exception as error:
            self._error = error
            return False
        return True

    def _pause(self, seconds: float) -> None:
        """Have only a choice that ends wake the reader, until a time at which all readers go on: they cost one turn of
        the loop then, not one each."""
        if seconds and not self._pausing:
            self._pausing = True
            self._loop.call_at((self._loop.time() // seconds + 1) * seconds, self._resume)

    def _resume(self) -> None:
        self._pausing = False
        self._told.set()

    def _wake(self, ended: bool) -> None:
        """Called by the engine's thread: one call into the loop is under way at a time."""
        if not self._waking and (ended or not self._pausing):
            self._waking = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._woken)

    def _woken(self) -> None:
        self._waking = False
        self._take()  # a reader may wait for its client
        self._told.set()
